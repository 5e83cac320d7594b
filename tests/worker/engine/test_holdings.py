from __future__ import annotations

from collections.abc import Sequence

from pie.page.events import PageEntry, Part
from pie.page.layout import LayerSpec, PageLayout, StateSpec
from pie.worker.holdings import Holdings
from pie.worker.page_table import Change
from tests.worker.engine.test_page_table import frozen, key

LAYOUT = PageLayout(
    (
        LayerSpec(Part.FULL, kv_heads=1, key_dim=2, value_dim=2),
        LayerSpec(Part.WINDOW, kv_heads=1, key_dim=1, value_dim=1, window=8),
    ),
    page_tokens=4,
    dtype="float32",
)


class Writer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[PageEntry]]] = []

    def stored(self, entries: Sequence[PageEntry]) -> None:
        self.calls.append(("stored", list(entries)))

    def removed(self, entries: Sequence[PageEntry]) -> None:
        self.calls.append(("removed", list(entries)))


def test_tells_every_part_in_the_tables_order() -> None:
    holdings, writer = Holdings(LAYOUT), Writer()
    changes = [
        Change(frozen(1), stored=True),
        Change(frozen(2, 1), stored=True),
        Change(frozen(1), stored=False),
        Change(frozen(1), stored=True),
    ]
    holdings.apply(changes, writer)
    told = [(call, [(one.key, one.part) for one in entries]) for call, entries in writer.calls]
    both = (Part.FULL, Part.WINDOW)
    assert told == [
        ("stored", [(key(number), part) for number in (1, 2) for part in both]),
        ("removed", [(key(1), part) for part in both]),
        ("stored", [(key(1), part) for part in both]),
    ]
    first = writer.calls[0][1][0]
    assert (first.parent, first.index, first.bytes) == (b"root", 1, 4 * 4 * 4)
    assert {(one.key, one.part) for one in holdings.snapshot()} == {
        (key(number), part) for number in (1, 2) for part in both
    }


def test_a_snapshot_is_told_for_itself() -> None:
    layout = PageLayout(
        (*LAYOUT.layers, LayerSpec(Part.STATE, states=(StateSpec((3, 2), "float32"),))),
        page_tokens=4,
        dtype="bfloat16",
    )
    holdings, writer = Holdings(layout), Writer()
    changes = [
        Change(frozen(1), stored=True),
        Change(frozen(1), stored=True, is_state=True),
        Change(frozen(1), stored=False),
    ]
    holdings.apply(changes, writer)
    told = [(call, [one.part for one in entries]) for call, entries in writer.calls]
    assert told == [
        ("stored", [Part.FULL, Part.WINDOW, Part.STATE]),
        ("removed", [Part.FULL, Part.WINDOW]),
    ]
    (held,) = holdings.snapshot()
    assert (held.part, held.bytes) == (Part.STATE, 3 * 2 * 4)

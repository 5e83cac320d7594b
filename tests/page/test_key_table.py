"""The table of keys against a dict, one at a time and many at once."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pie.page import key_table
from pie.page.key import PageKey
from pie.page.key_table import NO_ROW, KeyTable, as_keys


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32, "big"))


NAMES = st.tuples(st.integers(0, 300), st.integers(0, 2))


@pytest.mark.parametrize("few", [0, 10_000])
@given(st.lists(st.one_of(st.lists(NAMES, min_size=1), NAMES)))
def test_rows_are_those_of_a_dict(few: int, changes: list[object]) -> None:
    table = KeyTable()
    rows: dict[tuple[int, int], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_table, "_FEW", few)
        for change in changes:
            if isinstance(change, tuple):
                row = rows.pop(change, None)
                if row is None:
                    rows[change] = table.find_or_add(key(change[0]), change[1])
                else:
                    table.remove(row)
            elif isinstance(change, list):
                parts = np.array([part for _, part in change], np.uint8)
                found = table.find_or_add_all(as_keys([key(at) for at, _ in change]), parts)
                for name, row in zip(change, found.tolist(), strict=True):
                    assert rows.setdefault(name, row) == row
    table.check()
    assert len(table) == len(rows) == len(set(rows.values()))
    for (at, part), row in rows.items():
        assert table.find(key(at), part) == row
        assert (table.key(row), table.parts[row]) == (key(at), part)
    assert table.find(key(9_999), 0) == NO_ROW


def test_a_million_is_not_needed_to_see_shards_grow() -> None:
    table = KeyTable()
    for start in range(0, 60_000, 20_000):
        keys = [key(at) for at in range(start, start + 20_000)]
        table.find_or_add_all(as_keys(keys), np.zeros(len(keys), np.uint8))
    table.check()
    assert len(table) == 60_000


def test_keys_of_another_length_are_kept_as_they_are() -> None:
    table = KeyTable()
    row = table.find_or_add(b"short", 1)
    assert table.key(row) == b"short"
    assert table.find(b"short", 1) == row
    table.remove(row)
    assert table.find(b"short", 1) == NO_ROW

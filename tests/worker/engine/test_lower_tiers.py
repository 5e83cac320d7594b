"""What a worker's lower tiers say that they have, and what they count."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pie.page.events import Part, Tier as TierKind
from pie.page.key import PageKey
from pie.page.layout import LayerSpec, PageLayout, StateSpec
from pie.policies.manager import RetentionManager
from pie.pool.disk import DiskTier
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, Tier
from pie.worker.load_choice import LoadTier, Run
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_copies import PageCopies, PageNames
from pie.worker.page_table import FrozenPage
from tests.pool.faults import FaultyFiles
from tests.worker.engine.tiers import MIB, PAGE, ROOT

ATTENTION = LayerSpec(Part.FULL, kv_heads=1, key_dim=1, value_dim=1)
RECURRENT = LayerSpec(Part.STATE, states=(StateSpec((4,), "float32"),))
HYBRID, PURE = (ATTENTION, RECURRENT), (RECURRENT,)
HOST, DISK = TierKind.HOST, TierKind.DISK


class Zeros:
    """A memory of pages that hold nothing."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout
        self.error: Exception | None = None

    def export(self, page_id: int, part: Part) -> memoryview:
        if self.error is not None:
            raise self.error
        return memoryview(bytes(self.layout.part_bytes(part)))

    def load(self, page_id: int, part: Part, payload: memoryview) -> None:
        raise AssertionError(f"page {page_id} was written")


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(32))


class Lower:
    """Lower tiers, and pages that a test puts into one of them."""

    def __init__(self, layers: tuple[LayerSpec, ...], *tiers: Tier) -> None:
        layout = PageLayout(layers, PAGE, "float32")
        self.memory = Zeros(layout)
        self.copies = PageCopies(self.memory, PageNames(ROOT, layout))
        self.kinds = {tier.kind: tier for tier in tiers}
        self.tiers = LowerTiers([Level(tier, RetentionManager()) for tier in tiers], self.copies)

    def page(self, number: int) -> FrozenPage:
        return FrozenPage(key(number), bytes(32), number)

    def put(self, kind: TierKind, part: Part, *numbers: int) -> None:
        for number in numbers:
            ((header, payload),) = self.copies.copy(0, self.page(number), (part,))
            room = self.kinds[kind].prepare_store(header)
            assert isinstance(room, memoryview)
            room[:] = payload
            assert self.kinds[kind].complete_store(PageId(key(number), part), success=True)

    def runs(self, pages: int) -> list[Run]:
        return self.tiers.runs([key(number) for number in range(pages)], held=0)

    def demote(self, *numbers: int) -> None:
        parts = self.copies.names.layout.attention_parts
        self.tiers.demote([(0, self.page(number)) for number in numbers], parts)


Make = Callable[..., Lower]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Lower] = []

    def make(
        layers: tuple[LayerSpec, ...], *, host: int = MIB, files: FaultyFiles | None = None
    ) -> Lower:
        disk = DiskTier([tmp_path], 4 * MIB, kind=DISK, files=files)
        disk.open()
        made.append(Lower(layers, RamTier(host, kind=HOST), disk))
        made[-1].tiers.start(disk)
        return made[-1]

    yield make
    for lower in made:
        lower.tiers.close()


def test_a_snapshot_on_disk_alone_is_loaded_from_there(make: Make) -> None:
    lower = make(PURE)
    lower.put(DISK, Part.STATE, 3)
    assert lower.runs(6) == [Run(LoadTier.DISK, 4)]
    lower.put(HOST, Part.STATE, 1)
    assert lower.runs(6) == [Run(LoadTier.DISK, 4)]
    assert lower.runs(3) == [Run(LoadTier.HOST, 2)]


def test_a_page_is_in_the_lower_tier_of_it_and_its_snapshot(make: Make) -> None:
    lower = make(HYBRID)
    lower.put(HOST, Part.FULL, 0, 1, 2)
    lower.put(DISK, Part.STATE, 1)
    assert lower.runs(3) == [Run(LoadTier.HOST, 1), Run(LoadTier.DISK, 1)]


def test_what_the_pool_took_is_not_lost_where_there_is_no_room(make: Make) -> None:
    lower = make((ATTENTION,), host=4096)
    lower.tiers.in_pool.note([PageId(key(0), Part.FULL)])
    assert lower.tiers.tier_of(key(0), (Part.FULL,)) is LoadTier.POOL
    assert lower.tiers.tier_of(key(1), (Part.FULL,)) is None
    lower.memory.error = ValueError("no copy")
    lower.demote(0)
    assert lower.tiers.lost == 0
    lower.demote(1)
    assert lower.tiers.lost == 1


def test_of_the_pools_pages_the_last_ones_are_remembered(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pie.worker.in_pool._MOST", 3)
    lower = make((ATTENTION,))
    lower.tiers.in_pool.note(PageId(key(number), Part.FULL) for number in (0, 1, 2, 0, 3))
    known = [lower.tiers.tier_of(key(number), (Part.FULL,)) for number in range(4)]
    assert known == [LoadTier.POOL, None, LoadTier.POOL, LoadTier.POOL]


def test_a_late_copy_that_fails_costs_its_page_only(make: Make) -> None:
    lower = make((ATTENTION,))
    lower.memory.error = ValueError("no copy")
    lower.demote(0)
    lower.memory.error = None
    lower.demote(1)
    assert (lower.tiers.lost, lower.tiers.copied_late) == (1, 1)


def test_a_late_copy_never_writes_to_a_disk_that_may_be_tried_again(make: Make) -> None:
    files = FaultyFiles()
    lower = make((ATTENTION,), host=40_000, files=files)
    disk = lower.kinds[DISK]
    assert isinstance(disk, DiskTier)
    (folder,) = disk._folders
    folder.health.failed(OSError(errno.EIO, "broken"), "store")
    folder.health._retry_at_s = 0.0
    lower.demote(*range(100))
    assert (lower.tiers.copied_late, lower.tiers.lost) == (100, 0)
    assert not files.calls["append"] + files.calls["write_at"] + files.calls["write_new"]


def test_what_is_here_already_was_not_copied_again(make: Make) -> None:
    lower = make((ATTENTION,))
    for _ in range(2):
        assert lower.tiers.put(lower.copies.copy(0, lower.page(0), (Part.FULL,)))
    assert lower.tiers.stored == 1


def test_closing_leaves_a_disk_behind_that_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    lower, over = make((ATTENTION,)), threading.Event()
    tier = lower.tiers._tiers[-1]
    close = tier.close
    monkeypatch.setattr(tier, "close", lambda: over.wait(60) and close())
    lower.tiers.close(0.01)
    over.set()

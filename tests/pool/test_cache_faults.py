"""Whatever a lower tier does in the middle of a move, no pin, no count and no page of RAM is lost by it."""

import errno
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from pie.page.events import Part, Tier as TierKind
from pie.page.lookup import LookupStatus
from pie.policies.manager import RetentionManager
from pie.pool.cache import Level, Loan, TieredCache
from pie.pool.conformance import put, sample_key, sample_page
from pie.pool.disk import DiskTier
from pie.pool.mover import Mover
from pie.pool.ram import RamTier
from pie.pool.tier import PageId, StoredPage, id_of
from pie.pool.wrappers import FaultyTier, WrappedTier
from tests.pool.disk_places import LARGE, SMALL
from tests.pool.faults import CALLS, FaultyFiles
from tests.pool.index_log import IndexLog

_RAM_PAGES = 4


class Stack:
    """A little RAM over a disk that fails when a test says so."""

    def __init__(self, folder: Path, size: int) -> None:
        self.size = size
        self.files = FaultyFiles()
        self.disk = DiskTier([folder], 64 << 20, files=self.files, on_lost=self._lost)
        self.disk.open()
        self.takes = True
        lower = FaultyTier(self.disk, lambda call: not self.takes and "store" in call)
        self.index = IndexLog()
        self.levels = [
            Level(RamTier(_RAM_PAGES * (size + 8192)), RetentionManager()),
            Level(lower, RetentionManager()),
        ]
        self.cache = TieredCache(self.levels, index=self.index)
        self.losses = 0

    def _lost(self) -> None:
        self.losses += 1

    def put(self, number: int) -> bool:
        return _put(self.cache, number, self.size)

    def reads(self, number: int) -> bool:
        loan = self.cache.prepare_load(_page(number))
        if not isinstance(loan, Loan):
            return False
        assert loan.page.payload == sample_page(number, self.size)[1]
        self.cache.complete_load(loan)
        return True

    def sync(self) -> None:
        for folder in self.disk._folders:
            assert folder._syncer is not None
            folder._syncer.flush()

    def use_all(self) -> None:
        """Every verb, on pages of both tiers."""
        cache = self.cache
        cache.remove(_page(4))
        cache.expect([_page(number) for number in range(12)])
        self.reads(0)
        cache.promote(_page(1))
        for number in range(20, 26):
            assert self.put(number), "RAM takes pages, whatever the disk does"
        for number in (2, 3, 22):
            cache.remove(_page(number))
        self.sync()
        cache.relieve(0.0, 0.0)
        cache.save(float("inf"))
        for number in range(12):
            self.reads(number)

    def check(self) -> None:
        self.cache.reconcile()
        self.cache.check()
        assert self.index.entries == set(self.cache.entries())
        assert [level.manager.pinned_bytes for level in self.levels] == [0, 0]
        assert [shelf.leaving for shelf in self.cache._shelves] == [0, 0]
        assert all(entry.pins == 0 for entry in self.disk._table._entries.values())


def _put(cache: TieredCache, number: int, size: int) -> bool:
    header, payload = sample_page(number, size)
    room = cache.prepare_store(header)
    if not isinstance(room, memoryview):
        return False
    room[:] = payload
    return cache.complete_store(id_of(header), success=True)


def _page(number: int) -> PageId:
    return PageId(sample_key(number), Part.FULL)


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path, LARGE)
    yield made
    made.check()
    made.cache.close()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", [errno.ENODEV, errno.EROFS])
def test_a_disk_that_fails_at_any_call_leaves_nothing_pinned(
    tmp_path: Path, size: int, call: str, number: int
) -> None:
    stack = Stack(tmp_path, size)
    for page in range(12):
        assert stack.put(page)
    stack.files.numbers[call] = number
    stack.use_all()
    stack.check()
    was_off = stack.disk.folder_states()["off"] == 1
    assert stack.losses == was_off
    assert not was_off or not list(stack.disk.pages()), "of a disk that is off nothing is known"
    stack.files.numbers.clear()
    for page in range(30, 40):
        assert stack.put(page)
    stack.check()
    stack.cache.close()


class RaisingTier(WrappedTier):
    """Breaks the contract: a verb raises."""

    verb = ""

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        self._fail("prepare_load")
        return super().prepare_load(page)

    def complete_store(self, page: PageId, *, success: bool) -> bool:
        good = super().complete_store(page, success=success)
        self._fail("complete_store")
        return good

    def remove(self, page: PageId) -> bool:
        self._fail("remove")
        return super().remove(page)

    def _fail(self, verb: str) -> None:
        if verb == self.verb:
            raise RuntimeError(f"{verb} broke")


@pytest.mark.parametrize("verb", ["prepare_load", "complete_store", "remove"])
def test_a_tier_that_raises_keeps_no_victim_from_leaving_later(verb: str) -> None:
    tiers = [
        RaisingTier(RamTier(_RAM_PAGES * (LARGE + 8192))),
        RaisingTier(RamTier(1 << 20, kind=TierKind.POOL_DISK)),
    ]
    levels = [Level(tier, RetentionManager()) for tier in tiers]
    cache = TieredCache(levels)

    assert all(_put(cache, number, LARGE) for number in range(_RAM_PAGES))
    for tier in tiers:
        tier.verb = verb
        with suppress(RuntimeError):
            cache.relieve(0.0, 0.0)
        tier.verb = ""
    assert [level.manager.pinned_bytes for level in levels] == [0, 0]
    assert [shelf.leaving for shelf in cache._shelves] == [0, 0]
    assert all(_put(cache, number, LARGE) for number in range(10, 14))
    cache.close()


def test_a_copy_that_goes_up_costs_no_page_that_is_nowhere_else(stack: Stack) -> None:
    for number in range(_RAM_PAGES):
        assert stack.put(number)
    stack.cache.relieve(0.0, 0.0)
    for number in range(10, 10 + _RAM_PAGES):
        assert stack.put(number)
    stack.takes = False
    for number in range(_RAM_PAGES):
        assert stack.reads(number)
        assert not stack.cache.promote(_page(number))
    assert all(stack.reads(number) for number in range(10, 10 + _RAM_PAGES))
    stack.takes = True
    assert stack.cache.promote(_page(0)), "the disk takes what leaves for it"
    assert all(stack.reads(number) for number in range(10, 10 + _RAM_PAGES))


def test_a_victim_goes_past_a_tier_that_takes_nothing() -> None:
    ram = RamTier(_RAM_PAGES * (LARGE + 8192))
    disk = FaultyTier(RamTier(1 << 20, kind=TierKind.POOL_DISK), lambda call: "store" in call)
    bucket = RamTier(1 << 20, kind=TierKind.POOL_OBJECT)
    cache = TieredCache([Level(tier, RetentionManager()) for tier in (ram, disk, bucket)])
    assert all(_put(cache, number, LARGE) for number in range(_RAM_PAGES + 2))
    assert cache.pages_by_tier() == {"pool_ram": _RAM_PAGES, "pool_disk": 0, "pool_object": 2}
    cache.save(float("inf"))
    assert cache.pages_by_tier()["pool_object"] == _RAM_PAGES + 2
    cache.check()
    cache.close()


def test_what_came_while_the_last_tier_was_off_gets_there_from_whichever_tier_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pie.pool.mover._PAUSE_S", 0.01)
    is_off = True
    ram = RamTier(_RAM_PAGES * (LARGE + 8192))
    disk = RamTier(4 << 20, kind=TierKind.POOL_DISK)
    bucket = RamTier(4 << 20, kind=TierKind.POOL_OBJECT)
    last = FaultyTier(bucket, lambda call: is_off and "store" in call)
    cache = TieredCache([Level(tier, RetentionManager()) for tier in (ram, disk, last)])
    mover = Mover(cache, writes_through=True)
    mover.start()
    assert all(_put(cache, number, LARGE) for number in range(3 * _RAM_PAGES))
    assert cache.remove(_page(1))
    assert cache.pages_by_tier()["pool_disk"] >= 2 * _RAM_PAGES - 1
    assert mover.waiting > 0
    is_off = False
    until_s = time.monotonic() + 60
    while mover.waiting and time.monotonic() < until_s:
        time.sleep(0.01)
    assert mover.close(60), "what it was at is done"
    assert {id_of(header) for header in bucket.pages()} == {
        _page(number) for number in range(3 * _RAM_PAGES) if number != 1
    }
    assert mover.passed_over == 0
    cache.close()


def test_of_too_many_pages_that_wait_some_are_passed_over_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pie.pool.mover._MOST_NEW", 2)
    cache = TieredCache([Level(RamTier(1 << 20), RetentionManager())])
    mover = Mover(cache, writes_through=True)
    for number in range(5):
        mover.write_through_soon(_page(number), is_persistent=False)
    assert (mover.waiting, mover.passed_over) == (2, 3)


def test_what_an_earlier_start_did_not_bring_to_the_last_tier_goes_there_at_the_next() -> None:
    disk = RamTier(4 << 20, kind=TierKind.POOL_DISK)
    bucket = RamTier(4 << 20, kind=TierKind.POOL_OBJECT)
    for number in range(3):
        put(disk, *sample_page(number, LARGE))
    put(bucket, *sample_page(0, LARGE))
    tiers = (RamTier(1 << 20), disk, bucket)
    cache = TieredCache([Level(tier, RetentionManager()) for tier in tiers])
    cache.adopt()
    mover = Mover(cache, writes_through=True)
    mover.start()
    until_s = time.monotonic() + 60
    while mover.waiting and time.monotonic() < until_s:
        time.sleep(0.01)
    assert mover.close(60)
    assert cache.pages_by_tier() == {"pool_ram": 0, "pool_disk": 3, "pool_object": 3}
    cache.close()

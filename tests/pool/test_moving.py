"""Pages move between RAM and disk behind the back of those who use them, and none gets lost."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.page.events import Part, Tier as TierKind
from pie.page.lookup import LookupStatus
from pie.policies.manager import RetentionManager
from pie.pool.cache import Loan, TieredCache
from pie.pool.conformance import sample_key, sample_page
from pie.pool.disk import DiskTier
from pie.pool.mover import Mover
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, id_of
from pie.pool.wrappers import FaultyTier
from tests.pool.index_log import IndexLog

SIZE = 30_000
RAM_BYTES = 1 << 20


class Stack:
    """RAM over disk."""

    def __init__(self, folder: Path, *, disk_bytes: int = 64 << 20) -> None:
        self.disk = DiskTier([folder], disk_bytes)
        self.disk.open()
        self.broken = False
        lower = FaultyTier(self.disk, lambda call: self.broken and "store" in call)
        self.index = IndexLog()
        self.cache = TieredCache(
            [Level(RamTier(RAM_BYTES), RetentionManager()), Level(lower, RetentionManager())],
            index=self.index,
        )
        self.found = self.cache.adopt()
        self.index.entries = set(self.cache.entries())  # As a node announces itself.

    def put(self, number: int) -> bool:
        header, payload = sample_page(number, SIZE)
        room = self.cache.prepare_store(header)
        if not isinstance(room, memoryview):
            return False
        room[:] = payload
        return self.cache.complete_store(id_of(header), success=True)

    def reads(self, number: int) -> bool:
        loan = self.cache.prepare_load(_page(number))
        if not isinstance(loan, Loan):
            return False
        assert loan.page.payload == sample_page(number, SIZE)[1]
        self.cache.complete_load(loan)
        return True

    def tiers(self, number: int) -> set[TierKind]:
        return {e.tier for e in self.index.entries if e.key == sample_key(number)}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = Stack(tmp_path)
    yield made
    made.cache.check()
    assert made.index.entries == set(made.cache.entries())
    made.cache.close()


def _page(number: int) -> PageId:
    return PageId(sample_key(number), Part.FULL)


def test_ram_that_is_too_full_is_relieved_and_nothing_is_lost(stack: Stack) -> None:
    for number in range(32):
        assert stack.put(number)
    assert stack.cache.pages_by_tier() == {"pool_ram": 32, "pool_disk": 0}
    stack.cache.relieve(0.9, 0.5)
    assert stack.cache.pages_by_tier()["pool_ram"] <= 17
    assert not stack.cache.is_fuller_than(0.5)
    assert all(stack.reads(number) for number in range(32))
    assert stack.tiers(0) == {TierKind.POOL_DISK}, "the least recently used went first"
    assert stack.tiers(31) == {TierKind.POOL_RAM}


def test_ram_is_not_relieved_where_the_disk_takes_nothing(stack: Stack) -> None:
    for number in range(32):
        assert stack.put(number)
    stack.broken = True
    stack.cache.relieve(0.9, 0.5)
    assert stack.cache.pages_by_tier() == {"pool_ram": 32, "pool_disk": 0}
    # Only need lets a page go to nothing.
    assert all(stack.put(number) for number in range(40, 45))


def test_a_used_page_is_in_both_tiers_and_leaves_one_at_a_time(stack: Stack) -> None:
    for number in range(32):
        stack.put(number)
    stack.cache.relieve(0, 0)
    assert stack.cache.promote(_page(3))
    assert not stack.cache.promote(_page(3)), "it is there"
    assert not stack.cache.promote(_page(99))
    assert stack.tiers(3) == {TierKind.POOL_RAM, TierKind.POOL_DISK}
    demoted = stack.cache.counters.demoted
    stack.cache.relieve(0, 0)
    assert stack.tiers(3) == {TierKind.POOL_DISK}
    assert stack.cache.counters.demoted == demoted, "the disk had it: a copy was dropped"
    assert stack.cache.remove(_page(3))
    assert stack.tiers(3) == set()


def test_a_cache_takes_on_what_the_disk_holds(stack: Stack, tmp_path: Path) -> None:
    for number in range(20):
        stack.put(number)
    stack.cache.save(time.monotonic() + 60)
    stack.cache.close()
    again = Stack(tmp_path)
    assert again.found == 20
    assert all(again.reads(number) for number in range(20))
    assert again.tiers(5) == {TierKind.POOL_DISK}
    again.cache.check()
    again.cache.close()
    stack.__init__(tmp_path)  # type: ignore[misc]


def test_saving_ends_when_its_time_is_over(stack: Stack) -> None:
    for number in range(20):
        stack.put(number)
    stack.cache.save(time.monotonic() - 1)
    assert stack.cache.pages_by_tier()["pool_disk"] == 0


def test_who_may_not_wait_is_told_to_ask_again(stack: Stack) -> None:
    number = 0
    while stack.cache.prepare_store(sample_page(number, SIZE)[0], may_evict=False) is not (
        LookupStatus.RETRY
    ):
        stack.cache.complete_store(_page(number), success=False)
        assert stack.put(number)
        number += 1
    assert stack.cache.counters.no_room == stack.cache.counters.evicted == 0
    assert stack.put(number)
    assert [stack.cache.level_of(_page(each)) for each in (number, 999, 0)] == [0, 0, 1]
    misses = stack.cache.counters.misses
    assert stack.cache.prepare_load(_page(0), levels=1) is LookupStatus.RETRY
    assert stack.cache.counters.misses == misses
    assert stack.cache.prepare_load(_page(999), levels=1) is LookupStatus.MISS
    assert stack.cache.counters.misses == misses + 1


def test_many_threads_and_a_mover_refuse_and_lose_nothing(stack: Stack) -> None:
    mover = Mover(stack.cache)
    mover.start()
    problems: list[object] = []

    def work(first: int) -> None:
        chance = random.Random(first)
        try:
            stored: list[int] = []
            for number in range(first, first + 60):
                if not stack.put(number):
                    problems.append(f"{number} was refused")
                stored.append(number)
                wanted = chance.choice(stored)
                if not stack.reads(wanted):
                    problems.append(f"{wanted} is lost")
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends_s = time.monotonic() + 60
    while not stack.cache.counters.promoted and time.monotonic() < ends_s:
        time.sleep(0.002)
    assert mover.close(60)
    assert problems == []
    assert stack.cache.counters.promoted > 0
    assert all(stack.reads(first + n) for first in (0, 100, 200, 300) for n in range(60))


def test_a_mover_that_a_disk_holds_is_left_behind(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, over = threading.Event(), threading.Event()

    def hang(_page: PageId) -> bool:
        began.set()
        return over.wait(100)

    monkeypatch.setattr(stack.cache, "promote", hang)
    mover = Mover(stack.cache)
    mover.start()
    mover.promote_soon(_page(0))
    assert began.wait(60)
    assert not mover.close(0.01)
    over.set()
    assert mover.close(60)

"""The RAM tier passes the suite of all tiers, and keeps to its cap in physical memory."""

import random
import resource
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings

from pie.page.header import PageHeader
from pie.policies.manager import RetentionManager
from pie.pool.arena import ENTRY_BYTES, Arena
from pie.pool.cache import TieredCache
from pie.pool.conformance import TierConformance, put, sample_page, tier_machine
from pie.pool.errors import NoArenaError
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, Tier, id_of


class TestRamTier(TierConformance):
    def make_tier(self, budget_bytes: int) -> Tier:
        return RamTier(budget_bytes)

    def damage(self, tier: Tier, page: PageId) -> None:
        assert isinstance(tier, RamTier)
        tier._payload(tier._entries[page])[7] ^= 1


TestRamTierAgainstADict = tier_machine(RamTier).TestCase
TestRamTierAgainstADict.settings = settings(max_examples=60, stateful_step_count=40)


def test_memory_is_not_resident_before_it_is_used() -> None:
    before = _resident_bytes()
    tier = RamTier(4 << 30)
    assert _resident_bytes() - before < 64 << 20
    tier.close()


def test_a_budget_that_the_machine_cannot_map_is_refused() -> None:
    with pytest.raises(NoArenaError):
        RamTier(1 << 60)


def test_small_pages_after_large_ones_give_memory_back_for_their_bookkeeping() -> None:
    tier = RamTier(2 << 20)
    large = [sample_page(number, 256 << 10) for number in range(20)]
    for header, payload in large:
        put(tier, header, payload)
    for header, _ in large:
        tier.remove(id_of(header))
    assert tier.used_bytes == 0
    count = 0
    while put(tier, *sample_page(1000 + count, 64)):
        count += 1
        assert tier.resident_bytes <= 2 << 20
    tier.check()
    assert count > 900, "bookkeeping of 2 KiB a page is what limits small pages"
    assert tier.resident_bytes >= count * ENTRY_BYTES
    tier.close()


def test_physical_memory_stays_within_the_budget_whatever_comes_and_goes() -> None:
    budget = 64 << 20
    before = _resident_bytes()
    tier = RamTier(budget)
    chance = random.Random(1)
    held: list[PageId] = []
    number = 0
    for size in (1 << 20, 100, 300_000, 20_000, 1 << 20):
        for _ in range(3000 if size < 1000 else 100):
            number += 1
            header, payload = sample_page(number, size)
            while held and not put(tier, header, payload):
                tier.remove(held.pop(chance.randrange(len(held))))
            held.append(id_of(header))
        assert tier.used_bytes <= tier.resident_bytes <= budget
        # Python's own memory comes on top, and grows and shrinks as it likes.
        assert _resident_bytes() - before < budget + (12 << 20)
        tier.check()
    tier.close()


def test_a_page_takes_no_more_bookkeeping_than_is_counted() -> None:
    encoded = [
        (msgspec.msgpack.encode(header), payload)
        for header, payload in (sample_page(n, 16, parent=n - 1) for n in range(3000))
    ]
    cache = TieredCache([Level(RamTier(16 << 20), RetentionManager())])
    tracemalloc.start()
    for data, payload in encoded:
        header = msgspec.msgpack.decode(data, type=PageHeader)
        room = cache.prepare_store(header)
        assert isinstance(room, memoryview)
        room[:] = payload
        cache.complete_store(id_of(header), success=True)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken / 3000 < ENTRY_BYTES


def test_gaps_stay_small_when_pages_of_several_sizes_come_and_go() -> None:
    # Four sizes at once, random victims: harder than a node's few sizes under LRU.
    chance = random.Random(1)
    arena = Arena(256 << 20)
    held: list[int] = []
    worst = 1.0
    for turn in range(6000):
        size = chance.choice([90, 360, 520, 1024]) << 10
        start = arena.allocate(size)
        while start is None:
            arena.free(held.pop(chance.randrange(len(held))))
            start = arena.allocate(size)
            if turn > 3000:
                worst = min(worst, arena.used_bytes / arena.budget_bytes)
        held.append(start)
    arena.check()
    assert worst > 0.75


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()

"""The tiered cache evicts by the policy's word, demotes, and tells the index the truth."""

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from pie.page.events import Part, Tier as TierKind
from pie.page.key import RootKey, page_keys, tenant_root
from pie.page.lookup import LookupStatus
from pie.policies.loader import load_policies
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.rules import Pin, Rule, Ruled, Selector, Ttl
from pie.pool.cache import Loan, TieredCache
from pie.pool.conformance import put, sample_key, sample_page
from pie.pool.ram import RamTier
from pie.pool.shelf import Level
from pie.pool.tier import PageId, Tier, id_of
from pie.pool.wrappers import FaultyTier, MeteredTier, SlowTier
from tests.pool.index_log import IndexLog

PAGE_BYTES = 64 << 10
ROOM_FOR_3 = 3 * (PAGE_BYTES + 4096)


class Stack:
    """A cache with its tiers and its index at hand."""

    def __init__(self, *tiers: Tier) -> None:
        self.index = IndexLog()
        self.tiers = tiers
        self.cache = TieredCache(
            [Level(tier, RetentionManager()) for tier in tiers], index=self.index
        )

    def put(self, number: int, size: int = PAGE_BYTES, parent: int | None = None) -> bool:
        header, payload = sample_page(number, size, parent=parent)
        room = self.cache.prepare_store(header)
        if not isinstance(room, memoryview):
            return False
        room[:] = payload
        return self.cache.complete_store(id_of(header), success=True)

    def read(self, number: int) -> bytes | LookupStatus:
        loan = self.cache.prepare_load(_page(number))
        if not isinstance(loan, Loan):
            return loan
        payload = bytes(loan.page.payload)
        self.cache.complete_load(loan)
        return payload

    def holds(self, *numbers: int) -> list[bool]:
        return [self.cache.lookup(_page(number)) is LookupStatus.HIT for number in numbers]

    def check(self) -> None:
        self.cache.check()
        assert self.index.entries == set(self.cache.entries())


@pytest.fixture
def stack() -> Iterator[Callable[..., Stack]]:
    """Makes stacks, and checks them at the end."""
    made: list[Stack] = []

    def make(*tiers: Tier) -> Stack:
        made.append(Stack(*tiers))
        return made[-1]

    yield make
    for each in made:
        each.check()
        each.cache.close()


Make = Callable[..., Stack]


def test_a_full_cache_lets_the_least_recently_used_page_go_and_says_so(stack: Make) -> None:
    cache = stack(RamTier(ROOM_FOR_3))
    for number in (1, 2, 3):
        assert cache.put(number)
    cache.read(1)
    assert cache.put(4)
    assert cache.holds(1, 2, 3, 4) == [True, False, True, True]
    assert [entry.key for entry in cache.index.removals] == [sample_key(2)]
    assert cache.cache.counters.evicted == 1


def test_another_policy_takes_over_with_whose_pages_they_are_and_what_is_on_loan(
    stack: Make,
) -> None:
    cache = stack(RamTier(ROOM_FOR_3))
    for number in (1, 2, 3):
        cache.put(number)
    loan = cache.cache.prepare_load(_page(2))
    assert isinstance(loan, Loan)
    kept = Rule(Selector(prefix=sample_key(1).hex()), "pin", Pin())
    mine = Rule(Selector(tenant=loan.page.header.tenant_tag), "ttl", Ttl(after=3600.0))
    cache.cache.replace_policies(lambda: Ruled(LruRetention(), (kept, mine)))
    cache.check()
    assert cache.put(4)
    assert cache.holds(1, 2, 3, 4) == [True, True, False, True]
    cache.cache.complete_load(loan)
    cache.cache.replace_policies(LruRetention)
    cache.check()
    assert cache.put(5)
    assert cache.holds(1, 2, 4, 5) == [False, True, True, True]


def test_a_page_on_loan_is_no_victim(stack: Make) -> None:
    cache = stack(RamTier(ROOM_FOR_3))
    for number in (1, 2, 3):
        cache.put(number)
    loans = [cache.cache.prepare_load(_page(number)) for number in (1, 2, 3)]
    assert not cache.put(4)
    assert cache.cache.counters.no_room == 1
    for loan in loans:
        assert isinstance(loan, Loan)
        cache.cache.complete_load(loan)
    assert cache.put(4)


def test_a_victim_goes_to_the_next_tier_and_is_served_from_there(stack: Make) -> None:
    lower = RamTier(1 << 20, kind=TierKind.POOL_DISK)
    cache = stack(RamTier(ROOM_FOR_3), lower)
    for number in (1, 2, 3, 4):
        cache.put(number)
    assert cache.holds(1, 2, 3, 4) == [True] * 4
    assert cache.read(1) == sample_page(1, PAGE_BYTES)[1]
    assert cache.cache.pages_by_tier() == {"pool_ram": 3, "pool_disk": 1}
    assert {e.tier for e in cache.index.entries if e.key == sample_key(1)} == {TierKind.POOL_DISK}


def test_who_may_not_demote_lets_victims_go_and_the_lower_tier_alone(stack: Make) -> None:
    one = stack(RamTier(ROOM_FOR_3), RamTier(10 * ROOM_FOR_3, kind=TierKind.POOL_DISK))
    for number in range(3):
        one.put(number)
    header, _ = sample_page(3, PAGE_BYTES)
    assert isinstance(one.cache.prepare_store(header, may_demote=False), memoryview)
    one.cache.complete_store(id_of(header), success=False)
    assert one.holds(0, 1, 2) == [False, True, True]
    assert (one.cache.counters.evicted, one.cache.counters.demoted) == (1, 0)


def test_the_last_tier_evicts_when_it_is_full_too(stack: Make) -> None:
    cache = stack(RamTier(ROOM_FOR_3), RamTier(ROOM_FOR_3, kind=TierKind.POOL_DISK))
    for number in range(8):
        assert cache.put(number)
    assert cache.holds(*range(8)) == [False, False, *[True] * 6]


def test_a_lower_tier_that_fails_costs_the_victim_and_nothing_else(stack: Make) -> None:
    failing = FaultyTier(RamTier(1 << 20, kind=TierKind.POOL_DISK), lambda call: "store" in call)
    cache = stack(RamTier(ROOM_FOR_3), failing)
    for number in (1, 2, 3, 4):
        assert cache.put(number)
    assert cache.holds(1, 2, 3, 4) == [False, True, True, True]


def test_a_page_is_read_from_the_upper_tier_only_once_for_a_demotion(stack: Make) -> None:
    upper = MeteredTier(RamTier(ROOM_FOR_3))
    cache = stack(upper, RamTier(1 << 20, kind=TierKind.POOL_DISK))
    for number in (1, 2, 3, 4):
        cache.put(number)
    assert upper.calls["prepare_load"] == 1


def test_a_page_that_is_too_large_for_the_cache_evicts_nothing(stack: Make) -> None:
    cache = stack(RamTier(ROOM_FOR_3))
    cache.put(1)
    assert not cache.put(2, ROOM_FOR_3 + 1)
    assert cache.holds(1) == [True]


def test_a_damaged_page_is_a_miss_and_the_index_hears_of_it(stack: Make) -> None:
    tier = RamTier(ROOM_FOR_3)
    cache = stack(tier)
    cache.put(1)
    tier._payload(tier._entries[_page(1)])[0] ^= 1
    assert cache.read(1) is LookupStatus.MISS
    assert cache.cache.bad_pages == (0, 1)
    assert cache.index.entries == set()


def test_a_page_that_goes_bad_while_lent_ends_its_loan_well(stack: Make) -> None:
    tier = RamTier(ROOM_FOR_3)
    cache = stack(tier)
    cache.put(1)
    loan = cache.cache.prepare_load(_page(1))
    assert isinstance(loan, Loan)
    tier._payload(tier._entries[_page(1)])[0] ^= 1
    assert cache.read(1) is LookupStatus.MISS
    cache.cache.complete_load(loan)
    assert cache.put(1)


def test_a_slow_store_keeps_nobody_else_waiting(stack: Make) -> None:
    entered, leave = threading.Event(), threading.Event()

    def sleep(_: float) -> None:
        if not entered.is_set():
            entered.set()
            assert leave.wait(60)

    slow = SlowTier(RamTier(1 << 20), 1.0, sleep)
    cache = stack(slow)
    writer = threading.Thread(target=cache.put, args=(1,))
    writer.start()
    assert entered.wait(60)
    assert cache.cache.lookup(_page(1)) is LookupStatus.PENDING
    assert cache.read(2) is LookupStatus.MISS
    leave.set()
    writer.join()
    assert cache.holds(1) == [True]


def test_of_many_writers_of_one_page_one_stores_it(stack: Make) -> None:
    cache = stack(RamTier(1 << 20))
    outcomes: list[bool] = []
    start = threading.Barrier(4)

    def write() -> None:
        start.wait()
        outcomes.extend(cache.put(number) for number in range(10))

    writers = [threading.Thread(target=write) for _ in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sum(outcomes) == cache.cache.counters.stored == 10


def test_threads_that_store_load_and_evict_leave_the_index_right(stack: Make) -> None:
    cache = stack(RamTier(ROOM_FOR_3 * 2), RamTier(ROOM_FOR_3, kind=TierKind.POOL_DISK))
    problems: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(150):
                number = chance.randrange(14)
                if chance.random() < 0.5:
                    cache.put(number)
                else:
                    got = cache.read(number)
                    if isinstance(got, bytes) and got != sample_page(number, PAGE_BYTES)[1]:
                        problems.append("a wrong payload")
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert problems == []


class CacheMachine(RuleBasedStateMachine):
    """Any order of verbs over two small tiers: what is served is always right, and the index knows."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(RamTier(128 << 10), RamTier(64 << 10, kind=TierKind.POOL_DISK))
        self.writing: dict[PageId, tuple[memoryview, bytes]] = {}
        self.ever: dict[PageId, bytes] = {}
        self.loans: list[Loan] = []

    @rule(number=st.integers(0, 9))
    def prepare_store(self, number: int) -> None:
        header, payload = sample_page(number, 1 + number * 4000)
        page = id_of(header)
        room = self.stack.cache.prepare_store(header)
        if isinstance(room, memoryview):
            assert page not in self.writing
            self.writing[page] = room, payload
        elif room is LookupStatus.PENDING:
            assert page in self.writing
        elif room is LookupStatus.HIT:
            assert page in self.ever
        else:
            assert self.writing or self.loans, "only what is in use keeps others out"

    @precondition(lambda self: bool(self.writing))
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data: st.DataObject, success: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.writing)))
        room, payload = self.writing.pop(page)
        room[:] = payload
        assert self.stack.cache.complete_store(page, success=success) == success
        if success:
            self.ever[page] = payload

    @rule(number=st.integers(0, 9))
    def prepare_load(self, number: int) -> None:
        loan = self.stack.cache.prepare_load(_page(number))
        if isinstance(loan, Loan):
            self.loans.append(loan)
        elif loan is LookupStatus.PENDING:
            assert _page(number) in self.writing

    @precondition(lambda self: bool(self.loans))
    @rule(data=st.data())
    def complete_load(self, data: st.DataObject) -> None:
        loan = self.loans.pop(data.draw(st.integers(0, len(self.loans) - 1)))
        self.stack.cache.complete_load(loan)

    @rule(number=st.integers(0, 9))
    def remove(self, number: int) -> None:
        page = _page(number)
        lent = any(id_of(loan.page.header) == page for loan in self.loans)
        gone = self.stack.cache.remove(page)
        assert gone == (page not in self.writing and not lent)

    @invariant()
    def lent_payloads_stay_as_they_are(self) -> None:
        for loan in self.loans:
            assert loan.page.payload == self.ever[id_of(loan.page.header)]

    @invariant()
    def everything_agrees(self) -> None:
        self.stack.check()

    def teardown(self) -> None:
        self.stack.cache.close()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40)


def _page(number: int) -> PageId:
    return PageId(sample_key(number), Part.FULL)


def test_the_index_hears_of_pages_that_a_tier_finds_after_an_empty_start(stack: Make) -> None:
    bucket = RamTier(4 << 20, kind=TierKind.POOL_OBJECT)
    cache = stack(RamTier(1 << 20), bucket)
    assert cache.cache.adopt() == 0
    for number in range(3):
        put(bucket, *sample_page(number, PAGE_BYTES))
    cache.cache.reconcile()
    assert {entry.key for entry in cache.index.entries} == set(map(sample_key, range(3)))


def test_the_index_does_not_hear_of_pages_at_the_start_which_are_announced_together() -> None:
    disk = RamTier(4 << 20, kind=TierKind.POOL_DISK)
    put(disk, *sample_page(0, PAGE_BYTES))
    stack = Stack(RamTier(1 << 20), disk)
    assert stack.cache.adopt() == 1
    assert not stack.index.entries
    assert [entry.key for entry in stack.cache.entries()] == [sample_key(0)]


POLICIES = """
prefixes:
  desk: {tokens: [1, 2, 3, 4]}
worker:
  rules:
    - match: {prefix: desk}
      action: persist-prefix
"""


@pytest.mark.parametrize("moment", ["adopt", "reconcile", "replace"])
def test_every_tenants_named_prefix_is_near_again_in_whichever_order_its_pages_are_found(
    moment: str,
) -> None:
    disk = RamTier(4 << 20, kind=TierKind.POOL_DISK)
    policies = load_policies(POLICIES, name="policies.yaml")
    ruled = policies.new_retention
    made = ruled if moment != "replace" else LruRetention
    cache = TieredCache(
        [Level(tier, RetentionManager(made())) for tier in (RamTier(1 << 20), disk)]
    )
    if moment == "reconcile":
        assert cache.adopt() == 0
    wanted = []
    sample, payload = sample_page(0, PAGE_BYTES)
    for salt in (None, "one", "two"):
        before: bytes = tenant_root(sample.model_root, salt=salt)
        keys = page_keys(RootKey(before), [1, 2, 3, 4, 5, 6], 2)
        parents = [before, *keys]
        wanted += [PageId(key, Part.FULL) for key in keys[:2]]
        for at in (2, 1, 0):
            named = {"key": keys[at], "parent": parents[at], "index": at, "page_tokens": 2}
            put(disk, structs.replace(sample, **named), payload)
    if moment == "reconcile":
        cache.reconcile()
    else:
        cache.adopt()
    if moment == "replace":
        assert cache.to_preload() == []
        cache.replace_policies(ruled)
    assert set(cache.to_preload()) == set(wanted)
    cache.check()

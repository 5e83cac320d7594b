"""Built-in retention policies: what all of them keep to, and what each is for."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.one_cache import Prompt, foresight, replay
from benchmarks.workloads import WORKLOADS, loop, scans, trunks
from pie.page.columns import PageColumns
from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.page.key_table import as_keys
from pie.policies.adaptive import AdaptiveRetention
from pie.policies.arc import ArcRetention
from pie.policies.frequency import CostRetention, LfuRetention
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.queued import QueuedRetention
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.retention import PageView
from pie.policies.s3_fifo import S3FifoRetention
from tests.policies.pages import key, number, view

NAMES = sorted(BUILTIN[PolicyKind.RETENTION])


def new(name: str) -> QueuedRetention:
    policy = BUILTIN[PolicyKind.RETENTION][name]()
    assert isinstance(policy, QueuedRetention)
    return policy


def order(policy: QueuedRetention) -> list[int]:
    policy.check()
    return [number(page) for page in policy.victims(1, 0.0)]


def use(policy: QueuedRetention, at: int, times: int = 1) -> None:
    for _ in range(times):
        policy.hit(key(at), Part.FULL, 0.0)


class AnyPolicyBehindTheManager(RuleBasedStateMachine):
    """Whatever happens, all that has no pin can leave, and children leave before parents."""

    def __init__(self) -> None:
        super().__init__()
        self.parents: dict[int, int | None] = {}
        self.pins: dict[int, int] = {}

    @initialize(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        self.manager = RetentionManager(new(name))

    @rule(at=st.integers(0, 30), parent=st.none() | st.integers(0, 30), again=st.integers(0, 20))
    def store(self, at: int, parent: int | None, again: int) -> None:
        parent = parent if parent is not None and parent < at else None
        self.parents.setdefault(at, parent)
        self.manager.stored(view(at, parent), 0.0)
        for _ in range(again):
            self.manager.hit(key(at), Part.FULL, 0.0)

    @rule(at=st.integers(0, 30))
    def remove(self, at: int) -> None:
        self.parents.pop(at, None)
        self.pins.pop(at, None)
        self.manager.removed(key(at), Part.FULL)

    @rule(at=st.integers(0, 30))
    def pin(self, at: int) -> None:
        if self.manager.pin(key(at), Part.FULL):
            self.pins[at] = self.pins.get(at, 0) + 1

    @rule(at=st.integers(0, 30))
    def unpin(self, at: int) -> None:
        if self.pins.get(at):
            self.manager.unpin(key(at), Part.FULL)
            self.pins[at] -= 1

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        for page in self.manager.victims(count, 0.0):
            self.remove(number(page))

    @invariant()
    def all_can_leave_children_first(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        leaving = [number(page) for page in self.manager.victims(1_000, 0.0)]
        assert sorted(leaving) == sorted(at for at in self.parents if not self.pins.get(at))
        place = {at: position for position, at in enumerate(leaving)}
        for at, parent in self.parents.items():
            if at in place and parent in place:
                assert place[at] < place[parent]


TestAnyPolicyBehindTheManager = AnyPolicyBehindTheManager.TestCase
TestAnyPolicyBehindTheManager.settings = settings(max_examples=150)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_can_be_repeated(name: str) -> None:
    prompts = WORKLOADS["mixed"](300)
    first, second = (replay(new(name), prompts, pages=200) for _ in range(2))
    assert (first.hit_tokens, first.evicted) == (second.hit_tokens, second.evicted)


@pytest.mark.parametrize("name", NAMES)
def test_no_policy_sees_more_than_foresight(name: str) -> None:
    prompts = WORKLOADS["sessions"](400)
    assert replay(new(name), prompts, pages=200).hit_rate <= foresight(prompts, pages=200).hit_rate


def test_lfu_keeps_what_is_used_often() -> None:
    policy = LfuRetention()
    for at in (1, 2, 3):
        policy.stored(view(at), 0.0)
    use(policy, 1, times=9)
    use(policy, 2, times=2)
    assert order(policy) == [3, 2, 1]


def test_lfu_forgets_what_was_used_often_once() -> None:
    policy = LfuRetention(half_life=1.0)
    policy.stored(view(1), 0.0)
    use(policy, 1, times=9)
    policy.stored(view(2), 0.0)
    for _ in range(2_000):
        use(policy, 2)
        list(policy.victims(1, 0.0))
    policy.stored(view(3), 0.0)
    use(policy, 3, times=3)
    assert order(policy) == [1, 3, 2]


def test_cost_gives_up_large_pages_before_small_ones() -> None:
    policy = CostRetention()
    policy.stored(view(1, size=100), 0.0)
    policy.stored(view(2, size=400), 0.0)
    use(policy, 2)
    assert order(policy) == [2, 1]


@pytest.mark.parametrize(("attention_pages", "leaves"), [(1024, [2, 1]), (1e9, [1, 2])])
def test_cost_keeps_what_is_deep_in_its_context_as_far_as_that_takes_longer(
    attention_pages: float, leaves: list[int]
) -> None:
    policy = CostRetention(attention_pages=attention_pages)
    policy.stored(replace(view(1), index=4096), 0.0)
    policy.stored(view(2), 0.0)
    assert order(policy) == leaves


def test_s3_fifo_keeps_what_is_used_again_through_a_scan() -> None:
    policy = S3FifoRetention()
    for at in range(20):
        policy.stored(view(at), 0.0)
        use(policy, at, times=2)
    for at in range(100, 180):
        policy.stored(view(at), 0.0)
    assert order(policy)[:80] == list(range(100, 180))


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    policy = ArcRetention()
    for at in range(20):
        policy.stored(view(at), 0.0)
        use(policy, at)
    for at in range(100, 180):
        policy.stored(view(at), 0.0)
    assert order(policy)[:80] == list(range(100, 180))


def test_arc_makes_room_for_what_it_misses() -> None:
    policy = ArcRetention()
    for at in range(4):
        policy.stored(view(at), 0.0)
        use(policy, at)
    policy.stored(view(9), 0.0)
    assert order(policy)[0] == 9
    policy.removed(key(9), Part.FULL)
    policy.stored(view(9), 0.0)  # A ghost of the first list: that one may be longer from now on.
    policy.stored(view(10), 0.0)
    assert order(policy)[0] == 0


@pytest.mark.parametrize("make", [trunks, scans, loop])
def test_adaptive_beats_lru_where_much_never_returns(make: Callable[[int], list[Prompt]]) -> None:
    prompts = make(2_000)
    lru = replay(LruRetention(), prompts, pages=1_500).hit_rate
    assert replay(AdaptiveRetention(), prompts, pages=1_500).hit_rate > lru + 0.03


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_adaptive_does_not_lose_to_lru(workload: str) -> None:
    prompts = WORKLOADS[workload](1_500)
    lru = replay(LruRetention(), prompts, pages=1_000).hit_rate
    assert replay(AdaptiveRetention(), prompts, pages=1_000).hit_rate >= lru - 0.005


def test_adaptive_is_lru_until_it_has_learned() -> None:
    policy = AdaptiveRetention()
    for at in range(12):
        policy.stored(view(at, at - 1 if at % 4 else None), 0.0)
    assert set(itertools.islice(order(policy), 4)) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", NAMES)
def test_pages_taken_on_together_leave_as_those_stored_one_by_one(name: str) -> None:
    together, alone = RetentionManager(new(name)), RetentionManager(new(name))
    names = [PageKey(at.to_bytes(32, "big")) for at in range(60)]
    # Sequences of five, the last page of every second one first, and a page whose parent is not held.
    order = [at for at in range(1, 60) if at % 10 == 9] + [
        at for at in range(1, 60) if at % 10 != 9
    ]
    parents = [names[at - 1] if at % 5 else bytes(32) for at in order]
    columns = PageColumns(
        keys=as_keys([names[at] for at in order]),
        parts=np.zeros(len(order), np.uint8),
        parents=as_keys(parents),
        indexes=np.array([at % 5 for at in order], np.int32),
        sizes=np.full(len(order), 7, np.int64),
        tags=np.zeros(len(order), np.int32),
        tenant_tags=[""],
    )
    together.adopt(columns, (), 0.0)
    for at, parent in zip(order, parents, strict=True):
        alone.stored(PageView(names[at], parent, at % 5, Part.FULL, Tier.DEVICE, 7), 0.0)
    for manager in (together, alone):
        manager.hit(names[24], Part.FULL, 1.0)
        manager.removed(names[14], Part.FULL)
        manager.check()
    assert together.used_bytes == alone.used_bytes
    assert together.victims(7 * 60, 2.0) == alone.victims(7 * 60, 2.0)

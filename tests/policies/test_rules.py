"""Retention rules: what they say comes before what policies say."""

from collections.abc import Iterable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.adaptive import AdaptiveRetention
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.rules import Action, Pin, Quota, Rule, Ruled, Selector, Ttl
from tests.policies.pages import key, number


def page(
    at: int, parent: int | None = None, *, tenant: str = "", tier: Tier = Tier.HOST, size: int = 1
) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, Part.FULL, tier, size, tenant)


def ruled(
    *rules: tuple[Selector, Action], policy: RetentionPolicy | None = None
) -> RetentionManager:
    named = tuple(Rule(selector, type(action).__name__, action) for selector, action in rules)
    return RetentionManager(Ruled(policy or LruRetention(), named), name="test")


def leaving(manager: RetentionManager, now_s: float = 0.0) -> list[int]:
    manager.check()
    order = [number(one) for one in manager.victims(1_000, now_s)]
    manager.check()
    return order


def test_what_is_pinned_leaves_after_all_else() -> None:
    manager = ruled((Selector(tenant="a"), Pin()))
    for at, tenant in enumerate("abab"):
        manager.stored(page(at, tenant=tenant), 0.0)
    assert leaving(manager) == [1, 3, 0, 2]


def test_no_more_is_pinned_than_the_rule_allows() -> None:
    manager = ruled((Selector(), Pin(max=10)))
    for at in range(4):
        manager.stored(page(at, size=4), 0.0)
    assert leaving(manager) == [2, 3, 0, 1]
    manager.removed(key(0), Part.FULL)
    manager.stored(page(9, size=4), 0.0)
    assert leaving(manager) == [2, 3, 1, 9]


def test_pages_before_a_pinned_one_stay_with_it() -> None:
    manager = RetentionManager(
        Ruled(LruRetention(), (Rule(Selector(prefix=key(0).hex() * 8), "pin", Pin()),))
    )
    last = PageKey(key(0) * 8)
    manager.stored(page(1), 0.0)
    manager.stored(page(2, 1), 0.0)
    manager.stored(PageView(last, key(2), 2, Part.FULL, Tier.HOST, 1), 0.0)
    manager.stored(page(9), 0.0)
    assert [one for one, _ in manager.victims(1_000, 0.0)] == [key(9), last, key(2), key(1)]


def test_what_is_unused_for_too_long_leaves_first() -> None:
    manager = ruled((Selector(tenant="a"), Ttl(after=10.0)))
    manager.stored(page(1), 0.0)
    manager.stored(page(2, tenant="a"), 0.0)
    assert leaving(manager, 9.0) == [1, 2]
    assert leaving(manager, 10.0) == [2, 1]


def test_a_use_begins_the_time_anew() -> None:
    manager = ruled((Selector(tenant="a"), Ttl(after=10.0)))
    manager.stored(page(1), 0.0)
    manager.stored(page(2, tenant="a"), 0.0)
    manager.hit(key(2), Part.FULL, 8.0)
    assert leaving(manager, 12.0) == [1, 2]
    assert leaving(manager, 18.0) == [2, 1]
    manager.hit(key(2), Part.FULL, 19.0)
    assert leaving(manager, 20.0) == [1, 2]
    assert leaving(manager, 29.0) == [2, 1]


def test_a_tenant_over_its_quota_gives_first() -> None:
    manager = ruled((Selector(tenant="?"), Quota(max=2)))
    manager.stored(page(0), 0.0)
    for at, tenant in enumerate("aaab", start=1):
        manager.stored(page(at, tenant=tenant), 0.0)
    assert leaving(manager) == [1, 0, 2, 3, 4]
    manager.hit(key(1), Part.FULL, 0.0)
    assert leaving(manager)[0] == 2
    manager.removed(key(2), Part.FULL)
    assert leaving(manager) == [0, 3, 4, 1]


def test_the_first_rule_that_fits_is_the_one() -> None:
    manager = ruled((Selector(tenant="a"), Ttl(after=1.0)), (Selector(), Pin()))
    manager.stored(page(1, tenant="a"), 0.0)
    manager.stored(page(2, tenant="b"), 0.0)
    assert leaving(manager, 5.0) == [1, 2]


def test_pages_come_under_a_rule_once_they_are_used_enough() -> None:
    manager = ruled((Selector(hits=2), Pin()))
    for at in (1, 2, 3):
        manager.stored(page(at), 0.0)
    for at, times in ((1, 2), (2, 1)):
        for _ in range(times):
            manager.hit(key(at), Part.FULL, 0.0)
    assert leaving(manager) == [3, 2, 1]


def test_rules_are_for_tiers_and_parts() -> None:
    selector = Selector(tier=["disk", "pool-disk"], part=["full"])
    assert selector.matches(page(1, tier=Tier.DISK))
    assert not selector.matches(page(1, tier=Tier.HOST))
    assert not selector.matches(PageView(key(1), b"", 0, Part.STATE, Tier.DISK, 1))


class Backwards:
    """A user's policy: the page stored last leaves first."""

    def __init__(self) -> None:
        self.held: list[tuple[PageKey, Part]] = []

    def stored(self, page: PageView, now_s: float) -> None:
        self.held.append((page.key, page.part))

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None:
        self.held.remove((key, part))

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        return reversed(self.held)


def test_rules_come_before_a_users_policy() -> None:
    manager = ruled(
        (Selector(tenant="a"), Pin()), (Selector(tenant="b"), Ttl(after=1.0)), policy=Backwards()
    )
    for at, tenant in enumerate(["", "b", "", "a"]):
        manager.stored(page(at, tenant=tenant), 0.0)
    assert leaving(manager, 5.0) == [1, 2, 0, 3]
    assert manager.counts.fallbacks == 0


@pytest.mark.parametrize(
    ("first", "second", "covers"),
    [
        (Selector(), Selector(tenant="a"), True),
        (Selector(tenant="a*"), Selector(tenant="ab"), True),
        (Selector(tenant="a*"), Selector(tenant="*b"), False),
        (Selector(tenant="a"), Selector(), False),
        (Selector(tier=["disk", "host"]), Selector(tier=["disk"]), True),
        (Selector(tier=["disk"]), Selector(tier=["disk", "host"]), False),
        (Selector(hits=3), Selector(), False),
        (Selector(hits=3), Selector(hits=4), True),
        (Selector(part=["state"]), Selector(tier=["disk"]), False),
    ],
)
def test_a_rule_that_leaves_nothing_to_another_is_known(
    first: Selector, second: Selector, covers: bool
) -> None:
    assert first.covers(second) is covers


class RulesAgainstAModel(RuleBasedStateMachine):
    """Whatever happens, books are right, all can leave, and bands are in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.parents: dict[int, int | None] = {}

    @initialize(is_adaptive=st.booleans())
    def begin(self, is_adaptive: bool) -> None:
        self.manager = ruled(
            (Selector(tenant="a", hits=2), Pin(max=3)),
            (Selector(tenant="a"), Ttl(after=5.0)),
            (Selector(tenant="b"), Quota(max=4)),
            (Selector(tenant="c"), Pin()),
            policy=AdaptiveRetention() if is_adaptive else LruRetention(),
        )

    @rule(at=st.integers(0, 20), parent=st.none() | st.integers(0, 20), who=st.sampled_from("abcd"))
    def store(self, at: int, parent: int | None, who: str) -> None:
        parent = parent if parent is not None and parent < at else None
        self.parents.setdefault(at, parent)
        self.manager.stored(page(at, parent, tenant=who), self.now_s)

    @rule(at=st.integers(0, 20))
    def hit(self, at: int) -> None:
        self.manager.hit(key(at), Part.FULL, self.now_s)

    @rule(at=st.integers(0, 20))
    def remove(self, at: int) -> None:
        self.parents.pop(at, None)
        self.manager.removed(key(at), Part.FULL)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 9))
    def evict(self, count: int) -> None:
        for one in self.manager.victims(count, self.now_s):
            self.remove(number(one))

    @invariant()
    def all_can_leave_children_first(self) -> None:
        if not hasattr(self, "manager"):
            return
        order = leaving(self.manager, self.now_s)
        assert sorted(order) == sorted(self.parents)
        for at, parent in self.parents.items():
            if parent in self.parents:
                assert order.index(at) < order.index(parent)


TestRulesAgainstAModel = RulesAgainstAModel.TestCase
TestRulesAgainstAModel.settings = settings(max_examples=100, deadline=None)

"""Retention rules: what they say comes before what policies say."""

from collections.abc import Iterable

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie.page.events import Part, Tier
from pie.page.key import PageKey, RootKey, page_keys
from pie.policies.adaptive import AdaptiveRetention
from pie.policies.hand_over import HandOver
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.prefixes import NamedPrefix, Prefixes
from pie.policies.retention import NO_ROOT, PageView, RetentionPolicy
from pie.policies.rules import (
    Action,
    KeepSession,
    PersistPrefix,
    Pin,
    Quota,
    Rule,
    Ruled,
    Selector,
    Ttl,
)
from tests.policies.pages import key, number


def page(
    at: int,
    parent: int | None = None,
    *,
    tenant: str = "",
    session: str = "",
    tier: Tier = Tier.HOST,
    size: int = 1,
    model: RootKey = NO_ROOT,
) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, Part.FULL, tier, size, tenant, session, model)


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


def test_room_that_nobody_uses_any_more_is_anothers() -> None:
    manager = ruled((Selector(), Pin(max=3)))
    for at, tenant in enumerate("aab"):
        manager.stored(page(at, tenant=tenant), 0.0)
    manager.stored(page(3, tenant="c"), 0.0)
    assert leaving(manager) == [1, 0, 2, 3], "the one given last, of whom was used longest ago"
    manager.hit(key(1), Part.FULL, 0.0)
    assert leaving(manager) == [2, 0, 3, 1], "a use brings it back"
    manager.removed(key(2), Part.FULL)
    manager.stored(page(4, tenant="a"), 0.0)
    assert leaving(manager) == [3, 0, 1, 4], "of others, not of its own"
    manager.stored(page(5, tenant="a"), 0.0)
    assert leaving(manager) == [3, 5, 0, 1, 4], "of one tenant what came first stays"


def test_pages_before_a_pinned_one_stay_with_it() -> None:
    manager = RetentionManager(
        Ruled(LruRetention(), (Rule(Selector(prefix=key(0).hex()), "pin", Pin()),))
    )
    last = key(0)
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


def test_a_tenants_pages_count_for_its_quota_also_from_their_second_rule_on() -> None:
    manager = ruled((Selector(hits=1), Quota(max=1)))
    for at, tenant in enumerate("abb"):
        manager.stored(page(at, tenant=tenant), 0.0)
        manager.hit(key(at), Part.FULL, 0.0)
    assert leaving(manager)[0] == 1


def test_pages_come_under_a_rule_once_they_are_old_enough() -> None:
    manager = ruled((Selector(age=10.0), Pin()))
    manager.stored(page(1), 0.0)
    manager.stored(page(2), 5.0)
    assert leaving(manager, 9.0) == [1, 2]
    assert leaving(manager, 10.0) == [2, 1]
    assert leaving(manager, 15.0) == [1, 2]


def test_rules_are_for_models_and_conversations() -> None:
    mine = page(1, session="5e55", model=RootKey(b"\x8f" * 32))
    assert Selector(model="8f8f*", session="?*").matches(mine)
    assert not Selector(model="8e*").matches(mine)
    assert not Selector(session="?*").matches(page(1))
    assert Selector(session="").matches(page(1))


def test_a_prefix_that_is_to_persist_leaves_last_and_is_told_in_order() -> None:
    root, tokens = RootKey(bytes(32)), list(range(6))
    keys = page_keys(root, tokens, 2)
    prefixes = Prefixes({"desk": NamedPrefix(tokens=tokens)})
    rules = (Rule(Selector(prefix="desk"), "persist-prefix", PersistPrefix(max=2)),)
    manager = RetentionManager(Ruled(LruRetention(), rules, prefixes))
    for at in (1, 0, 2):
        parent = keys[at - 1] if at else root
        manager.stored(
            PageView(keys[at], parent, at, Part.FULL, Tier.HOST, 1, model_root=root, page_tokens=2),
            0.0,
        )
    manager.stored(page(9), 0.0)
    assert manager.has_persistent
    assert manager.persistent() == [(keys[0], Part.FULL), (keys[1], Part.FULL)]
    assert not manager.is_persistent(keys[2], Part.FULL), "the rule allows two"
    assert [one for one, _ in manager.victims(1_000, 0.0)] == [keys[2], key(9), keys[1], keys[0]]
    manager.check()


def test_a_prefix_is_resolved_for_each_model() -> None:
    prefixes = Prefixes({"desk": NamedPrefix(text="Ahoy"), "key": NamedPrefix(key="ab" * 32)})
    for first in (0, 1):
        root = RootKey(bytes([first]) * 32)
        prefixes.resolve(root, 2, lambda _: [7, 8, 9])
        view = PageView(
            page_keys(root, [7, 8], 2)[0], root, 0, Part.FULL, Tier.HOST, 1, model_root=root
        )
        assert prefixes.names_of(view) == {"desk"}
    assert len(prefixes.runs()) == 2
    assert prefixes.names_of(PageView(PageKey(b"\xab" * 32), b"", 0, Part.FULL, Tier.HOST, 1)) == {
        "key"
    }


def test_a_conversation_is_kept_for_its_next_turn_and_no_longer() -> None:
    manager = ruled((Selector(), KeepSession(keep=10.0)))
    manager.stored(page(1, session="s"), 0.0)
    manager.stored(page(2, 1, session="s"), 0.0)
    manager.stored(page(3), 1.0)
    assert leaving(manager, 9.0) == [3, 2, 1]
    assert leaving(manager, 10.0) == [2, 1, 3]


def test_a_use_of_one_page_keeps_its_conversation() -> None:
    manager = ruled((Selector(), KeepSession(keep=10.0)))
    manager.stored(page(1, session="s"), 0.0)
    manager.stored(page(2, 1, session="s"), 0.0)
    manager.stored(page(3), 0.0)
    manager.hit(key(1), Part.FULL, 8.0)
    assert leaving(manager, 17.0) == [3, 2, 1]
    manager.used_above(key(2), Part.FULL, 17.5)
    assert leaving(manager, 27.0) == [3, 2, 1]
    assert leaving(manager, 27.5) == [2, 3, 1]
    manager.hit(key(1), Part.FULL, 30.0)
    assert leaving(manager, 30.0) == [2, 3, 1], "what was let go is kept when it is used again"


def test_the_conversation_unused_for_longest_gives_its_place() -> None:
    manager = ruled((Selector(), KeepSession(keep=10.0, max=4)))
    for at, session in enumerate(["a", "a", "b", "b"]):
        manager.stored(page(at, session=session), 0.0)
    manager.stored(page(9), 0.0)
    manager.hit(key(0), Part.FULL, 1.0)
    manager.stored(page(5, session="c"), 2.0)
    assert leaving(manager, 2.0) == [2, 3, 9, 1, 0, 5]


def test_who_computed_a_shared_prefix_first_is_not_kept_by_those_that_share_it() -> None:
    manager = ruled((Selector(session="?*"), KeepSession(keep=10.0, max=6)))
    manager.stored(page(0, session="first"), 0.0)
    manager.stored(page(1, 0, session="first"), 0.0)
    manager.stored(page(2, 1, session="first"), 0.0)
    for at in range(10, 14):
        manager.hit(key(1), Part.FULL, float(at))
        manager.hit(key(0), Part.FULL, float(at))
        manager.stored(page(at, 1, session=f"later {at}"), float(at))
    manager.stored(page(20), 14.0)
    # The prefix is let go of with its conversation; what follows it is kept, so it goes after that.
    assert leaving(manager, 14.0) == [2, 20, 10, 11, 12, 13, 1, 0]
    # A conversation's own pages are used by itself.
    manager.hit(key(2), Part.FULL, 15.0)
    assert leaving(manager, 15.0)[:2] == [20, 10]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 4, 0, 3, 1]])
@pytest.mark.parametrize("is_taken_over", [False, True])
def test_a_prefix_is_shared_in_whatever_order_its_pages_come(
    order: list[int], is_taken_over: bool
) -> None:
    rule = (Selector(session="?*"), KeepSession(keep=10.0))
    pages = [page(0, session="first"), *(page(at, at - 1, session="first") for at in (1, 2, 3))]
    pages += [page(4, 1, session="second")]
    manager = ruled(rule)
    for at in order:
        manager.stored(pages[at], 0.0)
    if is_taken_over:
        to_move = manager.begin_replace(
            Ruled(LruRetention(), (Rule(rule[0], "keep-session", rule[1]),))
        )
        to_move.put_in_order()
        for at in map(number, to_move.take(9)):
            manager.move_over(pages[at], 0.0)
        manager.end_replace()
    manager.stored(page(9), 0.0)
    for at in (4, 1, 0):
        manager.hit(key(at), Part.FULL, 8.0)
    # The first conversation's time is over.
    assert leaving(manager, 15.0)[2:] == [9, 4, 1, 0]


def test_a_conversation_that_an_old_page_joins_is_no_younger_for_it() -> None:
    manager = ruled((Selector(session="?*", age=5.0), KeepSession(keep=100.0, max=2)))
    manager.stored(page(2, session="used"), 0.0)
    manager.stored(page(1, session="old"), 0.0)
    manager.hit(key(2), Part.FULL, 4.0)
    assert leaving(manager, 5.0) == [1, 2]
    manager.stored(page(3, session="new"), 5.5)
    assert leaving(manager, 11.0) == [1, 2, 3]


def test_conversations_of_two_tenants_with_one_name_are_two() -> None:
    manager = ruled((Selector(), KeepSession(keep=10.0)))
    manager.stored(page(1, session="s", tenant="a"), 0.0)
    manager.stored(page(2, session="s", tenant="b"), 0.0)
    manager.hit(key(1), Part.FULL, 5.0)
    assert leaving(manager, 12.0) == [2, 1]


def test_a_large_conversation_is_kept_as_far_as_the_rule_allows() -> None:
    manager = ruled((Selector(), KeepSession(keep=10.0, max=2)))
    for at in range(4):
        manager.stored(page(at, session="s"), 0.0)
    manager.stored(page(9), 0.0)
    assert leaving(manager, 1.0) == [2, 3, 9, 0, 1]


def test_a_policy_takes_over_pages_pins_uses_and_times() -> None:
    manager = ruled((Selector(session="?*"), KeepSession(keep=10.0)))
    for at in range(4):
        manager.stored(page(at, session="s" if at == 0 else ""), float(at))
    manager.pin(key(1), Part.FULL)
    manager.hit(key(2), Part.FULL, 5.0)
    rules = (
        Rule(Selector(session="?*"), "keep-session", KeepSession(keep=20.0)),
        Rule(Selector(hits=1), "pin", Pin()),
    )
    order = manager.begin_replace(Ruled(AdaptiveRetention(), rules))
    order.put_in_order()
    assert [number(one) for one in order.take(3) + order.take(3)] == [0, 1, 3, 2]
    assert order.take(3) == []
    for one in (0, 1, 3):
        manager.move_over(page(one, session="s" if one == 0 else ""), 6.0)
        manager.check()
    assert leaving(manager, 6.0)[-1] == 0, "the old policy answers until all is handed over"
    manager.stored(page(4), 7.0)
    manager.removed(key(3), Part.FULL)
    manager.unpin(key(1), Part.FULL)
    manager.move_over(page(2), 8.0)
    manager.move_over(page(2), 8.0)
    manager.end_replace()
    assert sorted(leaving(manager, 9.0)[2:]) == [0, 2]
    assert sorted(leaving(manager, 19.0)[2:]) == [0, 2]
    assert leaving(manager, 20.0)[-1] == 2, "twenty seconds from when it came, not from the edit"
    assert 0 in leaving(manager, 20.0)[:3]
    assert manager.policy_name == "AdaptiveRetention"


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


class Silent(Backwards):
    """A user's policy that proposes nothing."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        return ()


@pytest.mark.parametrize("policy", [Backwards, Silent])
def test_pages_before_a_kept_one_leave_after_it_whatever_a_policy_says(
    policy: type[Backwards],
) -> None:
    manager = ruled((Selector(tenant="a"), Pin()), policy=policy())
    manager.stored(page(1), 0.0)
    manager.stored(page(2, 1, tenant="a"), 0.0)
    manager.stored(page(3), 0.0)
    assert leaving(manager) == [3, 2, 1]


class RulesAgainstAModel(RuleBasedStateMachine):
    """Whatever happens, books are right, all can leave, and bands are in order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.parents: dict[int, int | None] = {}
        self.views: dict[int, PageView] = {}
        self.to_move: HandOver | None = None

    @initialize(is_adaptive=st.booleans())
    def begin(self, is_adaptive: bool) -> None:
        rules: tuple[tuple[Selector, Action], ...] = (
            (Selector(tenant="a", hits=2), Pin(max=3)),
            (Selector(tenant="a"), Ttl(after=5.0)),
            (Selector(tenant="b"), Quota(max=4)),
            (Selector(tenant="[cf]", hits=1), Pin(max=3)),
            (Selector(tenant="c"), Pin()),
            (Selector(tenant="d", age=6.0), Ttl(after=2.0)),
            (Selector(session="?*", hits=1), KeepSession(keep=5.0, max=3)),
            (Selector(session="?*"), KeepSession(keep=9.0, max=6)),
            (Selector(tenant="[a-e]", hits=1), Quota(max=5)),
        )
        policy = AdaptiveRetention() if is_adaptive else LruRetention()
        self.manager = ruled(*rules, policy=policy)
        self.ruling = tuple(Rule(selector, "", action) for selector, action in rules)

    @rule(
        at=st.integers(0, 20), parent=st.none() | st.integers(0, 20), who=st.sampled_from("abcdef")
    )
    def store(self, at: int, parent: int | None, who: str) -> None:
        parent = parent if parent is not None and parent < at else None
        self.parents.setdefault(at, parent)
        session = who if who in "def" else ""
        self.views.setdefault(at, page(at, self.parents[at], tenant=who, session=session))
        self.manager.stored(self.views[at], self.now_s)

    @rule(at=st.integers(0, 20))
    def hit(self, at: int) -> None:
        self.manager.hit(key(at), Part.FULL, self.now_s)

    @rule(at=st.integers(0, 20))
    def use_above(self, at: int) -> None:
        self.manager.used_above(key(at), Part.FULL, self.now_s)

    @rule(at=st.integers(0, 20))
    def remove(self, at: int) -> None:
        self.parents.pop(at, None)
        self.views.pop(at, None)
        self.manager.removed(key(at), Part.FULL)

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(is_adaptive=st.booleans())
    def begin_handover(self, is_adaptive: bool) -> None:
        policy = AdaptiveRetention() if is_adaptive else LruRetention()
        self.to_move = self.manager.begin_replace(Ruled(policy, self.ruling))
        self.to_move.put_in_order()

    @rule(count=st.integers(1, 9))
    def hand_over(self, count: int) -> None:
        if self.to_move is None:
            return
        some = [number(one) for one in self.to_move.take(count)]
        for at in some:
            self.manager.move_over(self.views[at], self.now_s)
        if not some:
            self.manager.end_replace()
            self.to_move = None

    @rule()
    def abandon(self) -> None:
        if self.to_move is not None:
            self.manager.abandon_replace()
            self.to_move = None

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
TestRulesAgainstAModel.settings = settings(max_examples=100)

"""Tenants over their quota give first, whatever their pages look like and however many there are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.adaptive import AdaptiveRetention
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.rule_book import RuleBook
from pie.policies.rules import KeepSession, Pin, Quota, Rule, Ruled, Selector, Ttl
from tests.policies.pages import key, number

_MOST = 6


def page(
    at: int, parent: int | None = None, *, tenant: str, size: int = 1, session: str = ""
) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, Part.FULL, Tier.DEVICE, size, tenant, session)


def limited(most: int = _MOST, policy: RetentionPolicy | None = None) -> RetentionManager:
    rules = (
        Rule(Selector(tenant="pinned"), "pin", Pin()),
        Rule(Selector(tenant="?"), "quota", Quota(most)),
    )
    return RetentionManager(Ruled(policy or LruRetention(), rules))


def leaving(manager: RetentionManager, count: int, now_s: float = 0.0) -> list[int]:
    return [number(one) for one in manager.victims(count, now_s)]


@pytest.mark.parametrize("length", [10, 900, 2_000])
def test_a_long_chain_gives_before_an_older_innocent(length: int) -> None:
    manager = limited()
    manager.stored(page(0, tenant="b"), 0.0)
    for at in range(1, length + 1):
        manager.stored(page(at, at - 1 if at > 1 else None, tenant="a"), 0.0)
    # Of the ten it has four too many, and more of the longer ones.
    given = min(length - _MOST, 50)
    assert leaving(manager, given) == list(range(length, length - given, -1))
    assert leaving(manager, length - _MOST + 1)[-1] == 0
    manager.check()


def test_a_page_that_others_stand_on_leaves_with_the_last_of_them() -> None:
    manager = limited()
    manager.stored(page(0, tenant="c"), 0.0)
    for at in range(1, 8):
        manager.stored(page(at, at - 1 if at > 1 else None, tenant="a"), 0.0)
    for at in range(10, 17):
        manager.stored(page(at, 7 if at == 10 else None, tenant="b"), 0.0)
    # What `b` gives bares a page of `a`, which has one too many as well.
    assert leaving(manager, 3) == [10, 7, 0]


def test_a_page_below_a_pinned_one_is_no_reason_to_take_innocents() -> None:
    manager = limited()
    manager.stored(page(0, tenant="b"), 0.0)
    for at in range(1, 9):
        manager.stored(page(at, at - 1 if at in range(2, 5) else None, tenant="a"), 0.0)
    manager.pin(key(4), Part.FULL)
    manager.pin(key(5), Part.FULL)
    assert leaving(manager, 2) == [6, 7]
    manager.unpin(key(4), Part.FULL)
    assert leaving(manager, 2) == [4, 3]


def counted(work: Callable[[], object]) -> int:
    """Return how many lines of policies a call runs."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if "/policies/" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("shape", ["chains", "leaves", "pinned leaves"])
def test_what_one_page_costs_does_not_grow_with_tenants_or_pages(shape: str) -> None:
    def cost(tenants: int, pages: int) -> int:
        manager = limited()
        for tenant in range(tenants):
            for at in range(pages):
                mine = tenant * pages + at
                parent = mine - 1 if shape == "chains" and at else None
                manager.stored(page(mine, parent, tenant=chr(0x100 + tenant)), 0.0)
                if shape == "pinned leaves" and at:
                    manager.pin(key(mine), Part.FULL)
        lines = counted(lambda: manager.victims(1, 0.0))
        for mine in range(tenants * pages):
            manager.hit(key(mine), Part.FULL, 0.0)
        # What was left behind by uses is dropped once.
        leaving(manager, 1)
        return max(lines, counted(lambda: manager.victims(1, 0.0)))

    assert cost(40, 50) <= 1.2 * cost(4, 10)


def test_what_one_answer_costs_does_not_grow_with_conversations_whose_time_is_over() -> None:
    def cost(conversations: int) -> int:
        rules = (Rule(Selector(session="?*"), "keep-session", KeepSession(keep=1.0)),)
        manager = RetentionManager(Ruled(LruRetention(), rules))
        for at in range(conversations):
            manager.stored(page(at, tenant="a", session=f"s{at}"), 0.0)
        return counted(lambda: manager.victims(1, 5.0))

    assert cost(2_000) <= 1.2 * cost(500)


def test_timers_are_as_many_as_pages_held_however_many_came() -> None:
    rules = (
        Rule(Selector(tenant="a", age=1e5), "pin", Pin()),
        Rule(Selector(tenant="a"), "ttl", Ttl(1e4)),
    )
    manager = RetentionManager(Ruled(LruRetention(), rules))
    for at in range(3_000):
        manager.stored(page(at, tenant="a"), float(at))
        if at >= 10:
            manager.removed(key(at - 10), Part.FULL)
        manager.hit(key(max(at - 5, 0)), Part.FULL, float(at))
    manager.check()
    assert len(manager) == 10
    assert manager._book is not None
    assert len(manager._book._timers) == 10
    assert leaving(manager, 1) == [2_995]
    for at in range(2_990, 3_000):
        assert number(manager.victims(1, 2_999.0 + 1e4)[0]) in range(2_990, 3_000)
        manager.removed(key(at), Part.FULL)


class Silent:
    """A user's policy that proposes nothing."""

    def stored(self, page: PageView, now_s: float) -> None: ...

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        return ()


def test_a_tenant_whose_conversations_are_kept_stays_within_its_quota() -> None:
    rules = (
        Rule(Selector(session="?*"), "keep-session", KeepSession()),
        Rule(Selector(tenant="*"), "quota", Quota(4)),
    )
    manager = RetentionManager(Ruled(LruRetention(), rules))
    capacity = 12
    for at in range(50):
        # Four tenants have two pages each, of no conversation; then another one comes with many.
        tenant, session = (f"t{at % 4}", "") if at < 8 else ("a", f"s{at % 7}")
        manager.stored(page(at, tenant=tenant, session=session), float(at))
        if manager.used_bytes > capacity:
            for gone, part in manager.victims(manager.used_bytes - capacity, float(at)):
                manager.removed(gone, part)
    held = sorted(number(one) for one in manager.pages(0, manager.capacity))
    assert held == [*range(8), *range(46, 50)]
    manager.check()


@pytest.mark.parametrize("policy", [LruRetention, AdaptiveRetention, Silent])
def test_of_a_tenant_over_its_quota_kept_pages_leave_after_its_others(
    policy: Callable[[], RetentionPolicy],
) -> None:
    rules = (
        Rule(Selector(session="?*"), "keep-session", KeepSession(keep=100.0)),
        Rule(Selector(tenant="t"), "ttl", Ttl(after=10.0)),
        Rule(Selector(tenant="?"), "quota", Quota(1)),
    )
    manager = RetentionManager(Ruled(policy(), rules))
    manager.stored(page(0, tenant="t"), 0.0)
    manager.stored(page(1, tenant="a", session="s"), 1.0)
    manager.stored(page(2, tenant="a"), 2.0)
    manager.stored(page(3, 2, tenant="a", session="s"), 3.0)
    manager.stored(page(4, tenant="a"), 4.0)
    manager.stored(page(5, tenant="a"), 5.0)
    manager.stored(page(6, tenant="t"), 6.0)
    manager.hit(key(4), Part.FULL, 7.0)
    # One page each tenant may have. The time of `t` is over for both of its pages: it is not told of twice.
    assert leaving(manager, 7, 20.0) == [5, 4, 1, 3, 0, 6, 2]
    assert manager.counts.refused_unknown == 0
    # What is no longer kept is given with the others, by its latest use.
    assert leaving(manager, 7, 103.0) == [1, 3, 2, 5, 0, 6, 4]
    manager.check()


class QuotasAgainstAModel(RuleBasedStateMachine):
    """Whoever has too much gives before others: of what can leave the oldest first, and what is kept last.

    Then comes what rules let go, then the policy's order, then what is kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.pages: dict[int, PageView] = {}
        """In order of use."""
        self.pins: dict[int, int] = {}
        self.parents: dict[int, int | None] = {}
        self.hits: dict[int, int] = {}
        self.stored_s: dict[int, float] = {}
        self.used_s: dict[int, float] = {}
        self.sessions: dict[str, dict[int, None]] = {}
        """The pages that are kept of each tenant's conversation."""
        self.session_used_s: dict[str, float] = {}
        self.shared: set[int] = set()
        """Pages that others go on from: whose uses those are is not known."""

    @initialize(is_adaptive=st.booleans())
    def begin(self, is_adaptive: bool) -> None:
        self.is_adaptive = is_adaptive
        self.ruling = (
            Rule(Selector(tenant="c", hits=2), "pin", Pin()),
            Rule(Selector(tenant="a", hits=1), "quota", Quota(4)),
            Rule(Selector(session="?*"), "keep-session", KeepSession(keep=5.0)),
            Rule(Selector(tenant="b", age=7.0), "quota", Quota(3)),
            Rule(Selector(tenant="a"), "ttl", Ttl(3.0)),
            Rule(Selector(tenant="?"), "quota", Quota(_MOST)),
        )
        policy = AdaptiveRetention() if is_adaptive else LruRetention()
        self.manager = RetentionManager(Ruled(policy, self.ruling))

    @rule(
        at=st.integers(0, 24),
        parent=st.none() | st.integers(0, 23),
        tenant=st.sampled_from(["a", "b", "c", "free"]),
        size=st.integers(1, 3),
        session=st.sampled_from(["", "", "s"]),
    )
    def store(self, at: int, parent: int | None, tenant: str, size: int, session: str) -> None:
        if at in self.pages:
            return self.hit(at)
        parent = parent if parent is not None and parent < at else None
        self.pages[at] = page(at, parent, tenant=tenant, size=size, session=session)
        self.parents[at] = parent
        self.hits[at], self.stored_s[at], self.used_s[at] = 0, self.now_s, self.now_s
        self.keep_if_of_a_conversation(at)
        self.mark_shared(at, parent)
        self.manager.stored(self.pages[at], self.now_s)
        return None

    @rule(
        at=st.integers(0, 24),
        length=st.integers(3, 12),
        tenant=st.sampled_from("ab"),
        session=st.sampled_from(["", "s"]),
    )
    def store_chain(self, at: int, length: int, tenant: str, session: str) -> None:
        for one in range(at, at + length):
            self.store(one, one - 1 if one > at else None, tenant, 1, session)

    @rule(at=st.integers(0, 36))
    def hit(self, at: int) -> None:
        self.manager.hit(key(at), Part.FULL, self.now_s)
        if at in self.pages:
            self.pages[at] = self.pages.pop(at)
            self.used_s[at] = self.now_s
            if at not in self.shared:
                self.keep_if_of_a_conversation(at)
            self.hits[at] += 1
            if self.rule_of(at) != 2:
                self.forget(at)

    @rule(at=st.integers(0, 36))
    def pin(self, at: int) -> None:
        if self.manager.pin(key(at), Part.FULL):
            self.pins[at] = self.pins.get(at, 0) + 1

    @rule(at=st.integers(0, 36))
    def unpin(self, at: int) -> None:
        if self.pins.get(at):
            self.manager.unpin(key(at), Part.FULL)
            self.pins[at] -= 1

    @rule(at=st.integers(0, 36))
    def remove(self, at: int) -> None:
        if self.pages.pop(at, None) is not None:
            self.forget(at)
        self.pins.pop(at, None)
        self.manager.removed(key(at), Part.FULL)

    @rule(seconds=st.sampled_from([1.0, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(count=st.integers(1, 60), is_carried_out=st.booleans())
    def ask(self, count: int, is_carried_out: bool) -> None:
        for tenant, used_s in list(self.session_used_s.items()):
            if used_s + 5.0 <= self.now_s:
                del self.sessions[tenant], self.session_used_s[tenant]
        left = dict(self.pages)
        victims = leaving(self.manager, count, self.now_s)
        assert self.matched() == self.book.matched
        # What others bare gives in the next answer.
        is_giving = True
        for victim in victims:
            leaves = self.can_leave(left)
            if not leaves:
                break
            used = self.used(left)
            giving = [
                at for at in leaves if (one := self.quota_of(at)) and used[one] > self.most(one)
            ]
            is_giving = is_giving and bool(giving)
            if is_giving:
                mine = [at for at in giving if self.quota_of(at) == self.quota_of(victim)]
                assert mine, f"{victim} before {giving}"
                assert victim == min(mine, key=self.is_kept)
            else:
                bands = [self.band(at) for at in leaves]
                assert self.band(victim) == min(bands)
                if not self.is_adaptive:
                    assert victim == leaves[bands.index(min(bands))]
            del left[victim]
        if is_carried_out:
            for victim in victims:
                self.remove(victim)

    @property
    def book(self) -> RuleBook:
        assert self.manager._book is not None
        return self.manager._book

    def keep_if_of_a_conversation(self, at: int) -> None:
        if self.rule_of(at) == 2:
            tenant = self.pages[at].tenant_tag
            self.sessions.setdefault(tenant, {})[at] = None
            self.session_used_s[tenant] = self.now_s

    def mark_shared(self, at: int, parent: int | None) -> None:
        follow = Counter(one.parent for one in self.pages.values())
        self.shared.discard(at)
        if follow[key(at)] > 1:
            self.shared.add(at)
        if parent in self.pages and follow[key(parent)] > 1:
            before: int | None = parent
            while before in self.pages and before not in self.shared:
                self.shared.add(before)
                before = self.parents[before]

    def forget(self, at: int) -> None:
        for tenant, kept in list(self.sessions.items()):
            kept.pop(at, None)
            if not kept:
                del self.sessions[tenant], self.session_used_s[tenant]

    def rule_of(self, at: int) -> int | None:
        """Return what says how long a page stays."""
        one = self.pages[at]
        if one.tenant_tag == "c" and self.hits[at] >= 2:
            return 0
        if one.session_tag:
            return 2
        return 4 if one.tenant_tag == "a" else None

    def quota_of(self, at: int) -> tuple[int, str] | None:
        """Return under which quota a page counts, and as whose."""
        tenant = self.pages[at].tenant_tag
        if tenant == "free":
            return None
        is_old = tenant == "b" and self.stored_s[at] + 7.0 <= self.now_s
        return (1 if tenant == "a" and self.hits[at] else 3 if is_old else 5), tenant

    def most(self, quota: tuple[int, str]) -> int:
        return {1: 4, 3: 3, 5: _MOST}[quota[0]]

    def matched(self) -> list[int]:
        under = [0] * len(self.ruling)
        for at in self.pages:
            rule_of, quota = self.rule_of(at), self.quota_of(at)
            if rule_of is not None:
                under[rule_of] += 1
            if quota is not None:
                under[quota[0]] += 1
        return under

    def used(self, left: dict[int, PageView]) -> dict[tuple[int, str], int]:
        used: dict[tuple[int, str], int] = {}
        for at, one in left.items():
            if (quota := self.quota_of(at)) is not None:
                used[quota] = used.get(quota, 0) + one.bytes
        return used

    def can_leave(self, left: dict[int, PageView]) -> list[int]:
        """Return the pages that can leave, the one unused for longest in front."""
        before = {one.parent for one in left.values()}
        return [at for at, one in left.items() if one.key not in before and not self.pins.get(at)]

    def is_kept(self, at: int) -> bool:
        return self.rule_of(at) == 0 or any(at in kept for kept in self.sessions.values())

    def band(self, at: int) -> int:
        if self.is_kept(at):
            return 2
        return int(self.rule_of(at) != 4 or self.used_s[at] + 3.0 > self.now_s)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()


TestQuotasAgainstAModel = QuotasAgainstAModel.TestCase
TestQuotasAgainstAModel.settings = settings(max_examples=30)

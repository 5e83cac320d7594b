"""Tenants over their quota give first, whatever their pages look like and however many there are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie.page.events import Part, Tier
from pie.policies.adaptive import AdaptiveRetention
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.rules import Pin, Quota, Rule, Ruled, Selector, Ttl
from tests.policies.pages import key, number

_MOST = 6


def page(at: int, parent: int | None = None, *, tenant: str, size: int = 1) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, Part.FULL, Tier.DEVICE, size, tenant)


def limited(most: int = _MOST, policy: RetentionPolicy | None = None) -> RetentionManager:
    rules = (
        Rule(Selector(tenant="pinned"), "pin", Pin()),
        Rule(Selector(tenant="?"), "quota", Quota(most)),
    )
    return RetentionManager(Ruled(policy or LruRetention(), rules))


def leaving(manager: RetentionManager, count: int) -> list[int]:
    return [number(one) for one in manager.victims(count, 0.0)]


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


class QuotasAgainstAModel(RuleBasedStateMachine):
    """Whoever has too much and a page that can leave gives before others, its oldest page first."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[int, PageView] = {}
        """In order of use."""
        self.pins: dict[int, int] = {}

    @initialize(is_adaptive=st.booleans())
    def begin(self, is_adaptive: bool) -> None:
        self.manager = limited(policy=AdaptiveRetention() if is_adaptive else None)

    @rule(
        at=st.integers(0, 24),
        parent=st.none() | st.integers(0, 23),
        tenant=st.sampled_from(["a", "b", "c", "free"]),
        size=st.integers(1, 3),
    )
    def store(self, at: int, parent: int | None, tenant: str, size: int) -> None:
        if at in self.pages:
            return self.hit(at)
        parent = parent if parent is not None and parent < at else None
        self.pages[at] = page(at, parent, tenant=tenant, size=size)
        self.manager.stored(self.pages[at], 0.0)
        return None

    @rule(at=st.integers(0, 24), length=st.integers(3, 12), tenant=st.sampled_from("ab"))
    def store_chain(self, at: int, length: int, tenant: str) -> None:
        for one in range(at, at + length):
            self.store(one, one - 1 if one > at else None, tenant, 1)

    @rule(at=st.integers(0, 36))
    def hit(self, at: int) -> None:
        self.manager.hit(key(at), Part.FULL, 0.0)
        if at in self.pages:
            self.pages[at] = self.pages.pop(at)

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
        self.pages.pop(at, None)
        self.pins.pop(at, None)
        self.manager.removed(key(at), Part.FULL)

    @rule(count=st.integers(1, 30), is_carried_out=st.booleans())
    def ask(self, count: int, is_carried_out: bool) -> None:
        left = dict(self.pages)
        victims = leaving(self.manager, count)
        for victim in victims:
            candidates = self.who_must_give(left)
            if not candidates:
                break
            mine = [at for at in candidates if left[at].tenant_tag == left[victim].tenant_tag]
            assert mine, f"{victim} before {candidates}"
            assert victim == mine[0]
            del left[victim]
        if is_carried_out:
            for victim in victims:
                self.remove(victim)

    def who_must_give(self, left: dict[int, PageView]) -> list[int]:
        """Return the pages that can leave of those who have too much, the one unused for longest in front."""
        used: dict[str, int] = {}
        for one in left.values():
            used[one.tenant_tag] = used.get(one.tenant_tag, 0) + one.bytes
        before = {one.parent for one in left.values()}
        return [
            at
            for at, one in left.items()
            if one.tenant_tag in "abc"
            and used[one.tenant_tag] > _MOST
            and one.key not in before
            and not self.pins.get(at)
        ]

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check()


TestQuotasAgainstAModel = QuotasAgainstAModel.TestCase
TestQuotasAgainstAModel.settings = settings(max_examples=60)

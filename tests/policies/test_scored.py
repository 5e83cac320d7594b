"""Policies that score pages, against a plain model; what they propose stays lazy."""

from __future__ import annotations

import itertools
from collections import UserList
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.aside import AsidePolicy
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.rules import Pin, Rule, Ruled, Selector
from pie.policies.scored import PageUse, ScoredRetention
from pie.simulator.watch import Watch
from tests.policies.pages import key, number, view

SCORES = st.integers(-2, 2)
NUMBERS = st.integers(0, 9)


class Told(ScoredRetention):
    """What a page is worth is told from outside."""

    def __init__(self) -> None:
        self.says: float = 0.0
        self.seen: list[tuple[int, float, float, int]] = []

    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        self.seen.append((number((page.key, page.part)), use.stored_s, use.used_s, use.uses))
        return self.says


class Latest(ScoredRetention):
    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        return use.used_s


def order(policy: ScoredRetention) -> list[int]:
    policy.check()
    return [number(page) for page in policy.victims(1, 0.0)]


def test_the_lowest_leaves_first_and_of_equals_the_one_unused_for_longest() -> None:
    policy = Told()
    for at, policy.says in ((1, 5.0), (2, -1.0), (3, 5.0), (4, float("inf"))):
        policy.stored(view(at), 0.0)
    assert order(policy) == [2, 1, 3, 4]
    policy.says = 5.0
    policy.hit(key(1), Part.FULL, 1.0)
    assert order(policy) == [2, 3, 1, 4]


def test_a_sequence_leaves_from_its_end_whatever_its_pages_are_worth() -> None:
    policy = Told()
    pages = ((1, None, 0.0), (2, 1, 1.0), (3, 2, 9.0), (4, 1, 2.0), (5, None, 5.0))
    for at, parent, policy.says in pages:
        policy.stored(view(at, parent), 0.0)
    assert order(policy) == [4, 5, 3, 2, 1]


def test_it_is_told_how_a_page_was_used() -> None:
    policy = Told()
    policy.stored(view(1), 3.0)
    policy.hit(key(1), Part.FULL, 4.0)
    policy.stored(view(1), 6.0)
    policy.hit(key(2), Part.FULL, 6.0)
    policy.removed(key(2), Part.FULL)
    policy.removed(key(1), Part.FULL)
    policy.stored(view(1), 7.0)
    assert policy.seen == [(1, 3.0, 3.0, 0), (1, 3.0, 4.0, 1), (1, 3.0, 6.0, 2), (1, 7.0, 7.0, 0)]


def test_a_score_that_is_no_number_fails_and_lru_helps_out() -> None:
    policy = Told()
    manager = RetentionManager(policy)
    policy.says = float("nan")
    manager.stored(view(1), 0.0)
    policy.says = 1.0
    manager.stored(view(2), 0.0)
    manager.hit(key(1), Part.FULL, 1.0)
    assert [number(page) for page in manager.victims(9, 2.0)] == [2, 1]
    assert manager.counts.failures == manager.counts.fallbacks == 1
    policy.check()


def test_a_few_proposals_of_many_pages_are_a_few_steps() -> None:
    policy = Latest()
    for at in range(5_000):
        policy.stored(view(at), float(at * 7_919 % 5_000))
    read: list[int] = []

    class Reading(UserList[tuple[float, int]]):
        def __getitem__(self, row: int) -> tuple[float, int]:  # type: ignore[override]
            read.append(row)
            return self.data[row]

    policy._pages.leaves._keys = Reading(policy._pages.ranks)
    some = list(itertools.islice(policy.victims(1, 0.0), 20))
    assert len(some) == 20
    assert 20 <= len(read) < 100


class Deepest(ScoredRetention):
    """Wants what is in use to leave first."""

    def __init__(self) -> None:
        self.proposed = 0

    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        return -number((page.key, page.part))

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        for page in super().victims(bytes_needed, now_s):
            self.proposed += 1
            yield page


RULES = (Rule(Selector(tenant="f" * 16), "pin", Pin()),)
ASKING: dict[str, Callable[[RetentionPolicy], RetentionPolicy]] = {
    "at once": lambda policy: policy,
    "aside": lambda policy: AsidePolicy(policy, deadline_s=60.0),
    "in a simulation": lambda policy: Watch().retention("one", policy),
    "after rules": lambda policy: Ruled(AsidePolicy(policy, deadline_s=60.0), RULES),
}


@pytest.mark.parametrize("asking", ASKING.values(), ids=ASKING.keys())
def test_pages_in_use_are_not_proposed_whoever_asks_and_whenever_it_took_over(
    asking: Callable[[RetentionPolicy], RetentionPolicy],
) -> None:
    first, second = Deepest(), Deepest()
    manager = RetentionManager(asking(first))

    def leaving(pages: int) -> list[int]:
        return [number(page) for page in manager.victims(pages, 1.0)]

    for at in range(600):
        manager.stored(view(at, at - 1 if at % 100 else None), 0.0)
        for _ in range(2 if at >= 300 else 0):
            manager.pin(key(at), Part.FULL)
    assert leaving(2) == [299, 298]

    manager.begin_replace(asking(second))
    for at in range(600):
        manager.move_over(view(at, at - 1 if at % 100 else None), 1.0)
        if at >= 400:
            manager.unpin(key(at), Part.FULL)
    assert leaving(2) == [299, 298]
    assert first.proposed <= 2 * 64
    manager.end_replace()
    assert leaving(2) == [299, 298]
    assert second.proposed <= 64
    for at in (300, 399, 499):
        for _ in range(manager.pins(key(at), Part.FULL)):
            manager.unpin(key(at), Part.FULL)
    assert leaving(3) == [499, 399, 299]
    # A page before one in use may leave too, and is not proposed.
    assert leaving(1_000)[-2:] == [0, 300]
    assert manager.counts.fallbacks == manager.counts.failures == manager.counts.refused_pinned == 0
    manager.removed(key(599), Part.FULL)
    manager.stored(view(599, 598), 2.0)
    assert leaving(1) == [599]
    first.check()
    second.check()


class Blind:
    """Wants to know of no pins: what it has of that name is its own."""

    pinned = 3

    def __init__(self) -> None:
        self.unpinned = list[PageKey]()

    def stored(self, page: PageView, now_s: float) -> None: ...
    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...
    def removed(self, key: PageKey, part: Part) -> None: ...
    def victims(self, bytes_needed: int, now_s: float) -> list[tuple[PageKey, Part]]:
        return []


class Failing(Latest):
    def pinned(self, key: PageKey, part: Part) -> None:
        raise RuntimeError("pinned")


def test_a_policy_without_these_methods_is_told_nothing_and_one_that_raises_in_them_is_contained() -> (
    None
):
    for policy, failures in ((Blind(), 0), (Failing(), 1)):
        manager = RetentionManager(policy)
        manager.stored(view(1), 0.0)
        assert manager.pin(key(1), Part.FULL)
        manager.unpin(key(1), Part.FULL)
        assert manager.counts.failures == failures


class ScoredAgainstAModel(RuleBasedStateMachine):
    """Scores and pages as they come, against sorting all pages for each proposal."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Told()
        self.parents: dict[int, int | None] = {}
        self.ranks: dict[int, tuple[float, int]] = {}
        self.pinned: set[int] = set()
        self.events = 0

    def rank(self, at: int, score: int) -> None:
        self.events += 1
        self.ranks[at] = (score, self.events)

    @rule(at=NUMBERS, before=st.integers(1, 9), score=SCORES)
    def store(self, at: int, before: int, score: int) -> None:
        self.policy.says = score
        parent = at - before if at >= before else None
        self.policy.stored(view(at, parent), 0.0)
        self.parents.setdefault(at, parent)
        self.rank(at, score)

    @rule(at=NUMBERS, score=SCORES)
    def hit(self, at: int, score: int) -> None:
        self.policy.says = score
        self.policy.hit(key(at), Part.FULL, 0.0)
        if at in self.parents:
            self.rank(at, score)

    @rule(at=NUMBERS)
    def remove(self, at: int) -> None:
        self.policy.removed(key(at), Part.FULL)
        if self.parents.pop(at, self) is not self:
            del self.ranks[at]
            self.pinned.discard(at)

    @rule(at=NUMBERS)
    def pin(self, at: int) -> None:
        self.policy.pinned(key(at), Part.FULL)
        if at in self.parents:
            self.pinned.add(at)

    @rule(at=NUMBERS)
    def unpin(self, at: int) -> None:
        self.policy.unpinned(key(at), Part.FULL)
        self.pinned.discard(at)

    def expected(self) -> Iterator[int]:
        left = dict(self.parents)
        while leaves := left.keys() - set(left.values()) - self.pinned:
            yield (first := min(leaves, key=self.ranks.__getitem__))
            del left[first]

    @invariant()
    def agree(self) -> None:
        assert order(self.policy) == list(self.expected())


TestScoredAgainstAModel = ScoredAgainstAModel.TestCase
TestScoredAgainstAModel.settings = settings(max_examples=60)

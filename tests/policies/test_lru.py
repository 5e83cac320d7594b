"""`lru` proposes the longest unused first, and no page before its children."""

import itertools
import time

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pie.page.events import Part
from pie.policies.lru import LruRetention
from tests.policies.pages import key, number, view


def order(policy: LruRetention) -> list[int]:
    policy.check()
    proposed = [number(page) for page in policy.victims(1, 0.0)]
    policy.check()
    return proposed


def test_the_longest_unused_goes_first() -> None:
    policy = LruRetention()
    for at in (1, 2, 3):
        policy.stored(view(at), 0.0)
    policy.hit(key(1), Part.FULL, 0.0)
    assert order(policy) == [2, 3, 1]


def test_a_sequence_goes_from_its_end() -> None:
    policy = LruRetention()
    for at in (1, 2, 3):
        policy.stored(view(at, at - 1), 0.0)
    policy.stored(view(9), 0.0)
    assert order(policy) == [3, 2, 1, 9]


def test_a_page_with_a_used_child_waits_for_it() -> None:
    policy = LruRetention()
    policy.stored(view(1), 0.0)
    policy.stored(view(2, 1), 0.0)
    policy.stored(view(3, 1), 0.0)
    policy.stored(view(9), 0.0)
    policy.hit(key(2), Part.FULL, 0.0)
    assert order(policy) == [3, 9, 2, 1]


def test_a_page_that_has_lost_its_children_goes_by_its_own_last_use() -> None:
    policy = LruRetention()
    policy.stored(view(1), 0.0)
    policy.stored(view(2, 1), 0.0)
    policy.stored(view(9), 0.0)
    policy.removed(key(2), Part.FULL)
    assert order(policy) == [1, 9]


def test_a_parent_may_come_after_its_child() -> None:
    policy = LruRetention()
    policy.stored(view(2, 1), 0.0)
    policy.stored(view(1), 0.0)
    assert order(policy) == [2, 1]


def test_parts_of_a_page_are_apart() -> None:
    policy = LruRetention()
    policy.stored(view(1, part=Part.FULL), 0.0)
    policy.stored(view(1, part=Part.STATE), 0.0)
    policy.stored(view(2, 1, part=Part.FULL), 0.0)
    proposed = list(policy.victims(1, 0.0))
    assert proposed == [(key(1), Part.STATE), (key(2), Part.FULL), (key(1), Part.FULL)]


def test_a_page_that_is_its_own_parent_harms_nobody() -> None:
    policy = LruRetention()
    policy.stored(view(1, 1), 0.0)
    policy.stored(view(2), 0.0)
    assert order(policy) == [2]
    policy.removed(key(1), Part.FULL)
    assert order(policy) == [2]


def test_events_about_pages_not_held_change_nothing() -> None:
    policy = LruRetention()
    policy.hit(key(1), Part.FULL, 0.0)
    policy.removed(key(1), Part.FULL)
    assert order(policy) == []


def test_a_proposal_cut_short_changes_nothing() -> None:
    policy = LruRetention()
    for at in range(10):
        policy.stored(view(at), 0.0)
    for _ in range(3):
        proposals = itertools.islice(policy.victims(1, 0.0), 4)
        assert [number(page) for page in proposals] == [0, 1, 2, 3]
        del proposals
    assert order(policy) == list(range(10))


def test_proposals_end_where_an_event_comes_in() -> None:
    policy = LruRetention()
    for at in range(6):
        policy.stored(view(at), 0.0)
    proposals = policy.victims(1, 0.0)
    assert number(next(proposals)) == 0
    policy.removed(key(1), Part.FULL)
    assert list(proposals) == []
    assert order(policy) == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("pages", [2_000, 20_000])
def test_the_cost_of_an_event_does_not_grow_with_the_pages(pages: int) -> None:
    # Not a matter of speed: ten times the pages at once, where each event looked at all of them,
    # would take minutes.
    policy = LruRetention()
    started_s = time.thread_time()
    for at in range(pages):
        policy.stored(view(at, at - 1 if at % 100 else None), 0.0)
    for at in range(pages):
        policy.hit(key(at), Part.FULL, 0.0)
    for _ in range(pages):
        page = next(iter(policy.victims(1, 0.0)))
        policy.removed(*page)
    assert order(policy) == []
    assert time.thread_time() - started_s < 60


class LruAgainstASlowOne(RuleBasedStateMachine):
    """Against the definition: of the pages without children, again and again the longest unused."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = LruRetention()
        self.parents: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.tick = itertools.count()

    @rule(at=st.integers(0, 8), parent=st.none() | st.integers(0, 8))
    def store(self, at: int, parent: int | None) -> None:
        if parent is not None and parent >= at:
            parent = None
        if at not in self.parents:
            self.parents[at] = parent
        self.used[at] = next(self.tick)
        self.policy.stored(view(at, parent), 0.0)

    @rule(at=st.integers(0, 8))
    def hit(self, at: int) -> None:
        if at in self.used:
            self.used[at] = next(self.tick)
        self.policy.hit(key(at), Part.FULL, 0.0)

    @rule(at=st.integers(0, 8))
    def remove(self, at: int) -> None:
        self.parents.pop(at, None)
        self.used.pop(at, None)
        self.policy.removed(key(at), Part.FULL)

    @rule(count=st.integers(0, 9))
    def look(self, count: int) -> None:
        list(itertools.islice(self.policy.victims(1, 0.0), count))

    @invariant()
    def agree(self) -> None:
        left = dict(self.parents)
        expected = []
        while left:
            leaves = [at for at in left if at not in left.values()]
            expected.append(min(leaves, key=self.used.__getitem__))
            del left[expected[-1]]
        assert order(self.policy) == expected


TestLruAgainstASlowOne = LruAgainstASlowOne.TestCase
TestLruAgainstASlowOne.settings = settings(max_examples=200)

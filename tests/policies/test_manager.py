"""The manager against a plain model, with policies that raise and propose nonsense."""

import asyncio
import functools
import itertools
import logging
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.rules import Pin, Rule, Ruled, Selector, Ttl
from pie.policies.victims import counted_together
from tests.policies.pages import key, number, view

Proposals = Callable[[int], Iterable[object]]


class Odd:
    """A policy that proposes whatever it is told to, and otherwise does nothing."""

    def __init__(self, proposals: Proposals) -> None:
        self._proposals = proposals

    def stored(self, page: PageView, now_s: float) -> None: ...

    def hit(self, key: PageKey, part: Part, now_s: float) -> None: ...

    def removed(self, key: PageKey, part: Part) -> None: ...

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        return self._proposals(bytes_needed)  # type: ignore[return-value]


class Raising:
    """A policy that raises at every call."""

    def stored(self, page: PageView, now_s: float) -> None:
        raise RuntimeError("stored")

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        raise RuntimeError("hit")

    def removed(self, key: PageKey, part: Part) -> None:
        raise RuntimeError("removed")

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        raise RuntimeError("victims")


class RaisingLate(LruRetention):
    """A policy that proposes one page and then raises."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        yield from itertools.islice(super().victims(bytes_needed, now_s), 1)
        raise RuntimeError("late")


class Ending:
    """A policy that raises, at every call, what would end a process or a task."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def stored(self, page: PageView, now_s: float) -> None:
        raise self._error

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        raise self._error

    def removed(self, key: PageKey, part: Part) -> None:
        raise self._error

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        yield key(3), Part.FULL
        raise self._error


class OwnKindError(BaseException):
    """What no `except Exception` catches."""


def manager_of(policy: RetentionPolicy | None = None, pages: int = 4) -> RetentionManager:
    manager = RetentionManager(policy)
    for at in range(pages):
        manager.stored(view(at), 0.0)
    return manager


def chosen(manager: RetentionManager, bytes_needed: int) -> list[int]:
    manager.check()
    return [number(page) for page in manager.victims(bytes_needed, 0.0)]


def test_just_enough_leaves() -> None:
    manager = RetentionManager()
    for at, size in enumerate((3, 5, 2)):
        manager.stored(view(at, size=size), 0.0)
    assert manager.used_bytes == 10
    assert len(manager) == 3
    assert (key(0), Part.FULL) in manager
    assert chosen(manager, 0) == []
    assert chosen(manager, 3) == [0]
    assert chosen(manager, 4) == [0, 1]
    assert chosen(manager, 11) == [0, 1, 2]


def test_asking_changes_nothing() -> None:
    manager = manager_of()
    assert chosen(manager, 2) == chosen(manager, 2) == [0, 1]
    assert manager.used_bytes == 4


def test_a_pinned_page_stays_until_its_last_pin_is_gone() -> None:
    manager = manager_of()
    assert manager.pin(key(0), Part.FULL)
    assert manager.pin(key(0), Part.FULL)
    assert manager.pins(key(0), Part.FULL) == 2
    assert manager.pinned_bytes == 1
    assert chosen(manager, 9) == [1, 2, 3]
    manager.unpin(key(0), Part.FULL)
    assert chosen(manager, 1) == [1]
    manager.unpin(key(0), Part.FULL)
    assert chosen(manager, 1) == [0]
    assert manager.pinned_bytes == 0


def test_a_page_that_is_not_held_cannot_be_pinned() -> None:
    manager = manager_of()
    assert not manager.pin(key(9), Part.FULL)
    with pytest.raises(ValueError, match="no pin"):
        manager.unpin(key(9), Part.FULL)
    with pytest.raises(ValueError, match="no pin"):
        manager.unpin(key(0), Part.FULL)


def test_a_removed_page_takes_its_pins_along() -> None:
    manager = manager_of()
    manager.pin(key(0), Part.FULL)
    manager.removed(key(0), Part.FULL)
    manager.removed(key(0), Part.FULL)
    manager.check()
    manager.stored(view(0), 0.0)
    assert manager.pins(key(0), Part.FULL) == 0


def test_pages_before_a_pinned_one_leave_last() -> None:
    manager = RetentionManager()
    for at in range(4):
        manager.stored(view(at, at - 1 if at else None), 0.0)
    manager.stored(view(9), 0.0)
    manager.pin(key(2), Part.FULL)
    assert chosen(manager, 2) == [3, 9]
    assert chosen(manager, 9) == [3, 9, 1, 0]


@pytest.mark.parametrize("policy", [Raising(), RaisingLate()], ids=["always", "late"])
def test_where_a_policy_raises_lru_answers(
    policy: RetentionPolicy, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, logger="pie.policies.manager"):
        manager = manager_of(policy)
        manager.hit(key(0), Part.FULL, 0.0)
        assert chosen(manager, 3) == [1, 2, 3]
    manager.removed(key(1), Part.FULL)
    assert chosen(manager, 3) == [2, 3, 0]
    assert manager.counts.failures > 0
    assert manager.counts.fallbacks == 2
    assert "`lru` decides" in caplog.text
    assert 1 <= len(caplog.records) < manager.counts.failures or manager.counts.failures <= 2
    manager.check()


@pytest.mark.parametrize(
    "error",
    [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), OwnKindError()],
    ids=lambda error: type(error).__name__,
)
def test_no_policy_ends_the_thread_that_asks_it(error: BaseException) -> None:
    with ThreadPoolExecutor(1) as step_thread:
        manager = step_thread.submit(manager_of, Ending(error)).result()
        step_thread.submit(manager.hit, key(0), Part.FULL, 0.0).result()
        assert step_thread.submit(chosen, manager, 3).result() == [3, 1, 2]
        step_thread.submit(manager.removed, key(1), Part.FULL).result()
    assert manager.counts.failures == 7
    assert manager.counts.fallbacks == 1
    manager.check()


def test_what_a_signal_raises_while_a_policy_runs_goes_on() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            manager_of(Ending(KeyboardInterrupt()))
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(OwnKindError):
        manager_of(Ending(OwnKindError()))


NONSENSE: dict[str, Proposals] = {
    "nothing": lambda _: [],
    "none": lambda _: None,  # type: ignore[dict-item,return-value]
    "a number": lambda _: 7,  # type: ignore[dict-item,return-value]
    "unknown pages": lambda _: [(key(70), Part.FULL), (key(71), Part.FULL)],
    "one page for ever": lambda _: itertools.repeat((key(0), Part.FULL)),
    "unknown pages for ever": lambda _: itertools.repeat((key(70), Part.FULL)),
    "no pages": lambda _: [None, 3, "a", [], {}, (key(0),), (key(0), 0, 0), (key(0), "FULL")],
    "one of them": lambda _: [(key(0), 0)],
}


@pytest.mark.parametrize("proposals", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_frees_what_is_needed_all_the_same(proposals: Proposals) -> None:
    manager = manager_of(Odd(proposals))
    manager.pin(key(2), Part.FULL)
    victims = manager.victims(3, 0.0)
    assert sorted(number(page) for page in victims) == [0, 1, 3]
    assert all(type(part) is Part for _, part in victims)


def test_a_policy_that_proposes_all_that_can_leave_has_not_failed() -> None:
    manager = manager_of()
    manager.pin(key(2), Part.FULL)
    assert chosen(manager, 9) == [0, 1, 3]
    assert manager.counts.fallbacks == 0
    assert manager.counts.refused_pinned == 0
    assert manager.counts.victims == 3


def test_what_fails_while_it_takes_over_is_counted_too() -> None:
    manager = manager_of(Raising())
    manager.begin_replace(Raising())
    manager.stored(view(9), 0.0)
    for at in (0, 1, 2, 3):
        manager.move_over(view(at), 0.0)
    manager.end_replace()
    assert manager.counts.failures == 4 + 2 + 4
    both = counted_together([manager.counts, manager.counts])
    assert (both.failures, both.victims, both.refused()) == (20, 0, {"pinned": 0, "unknown": 0})


def test_a_policys_own_order_is_kept() -> None:
    manager = manager_of(Odd(lambda _: [(key(at), Part.FULL) for at in (3, 1, 0, 2)]))
    assert chosen(manager, 3) == [3, 1, 0]
    assert manager.counts.failures == manager.counts.fallbacks == 0


def forests(pages: int) -> st.SearchStrategy[list[int | None]]:
    """The page before each of some, which is one of those before it in the list or none."""
    before = [st.none() | st.integers(0, at - 1) if at else st.none() for at in range(pages)]
    return st.tuples(*before).map(list)


@given(
    parents=st.integers(1, 10).flatmap(forests),
    proposed=st.lists(st.integers(0, 9)),
    pinned=st.sets(st.integers(0, 9), max_size=3),
    first=st.lists(st.integers(0, 9), max_size=3),
    bytes_needed=st.integers(1, 11),
)
def test_no_page_leaves_before_those_after_it_whatever_is_proposed(
    parents: list[int | None],
    proposed: list[int],
    pinned: set[int],
    first: list[int],
    bytes_needed: int,
) -> None:
    policy: RetentionPolicy = Odd(lambda _: [(key(at), Part.FULL) for at in proposed])
    # Pages that a rule wants to leave before a policy is asked, and those that one keeps.
    rules = (
        Rule(Selector(tenant="first"), "ttl", Ttl(1.0)),
        Rule(Selector(tenant="kept"), "pin", Pin()),
    )
    manager = RetentionManager(Ruled(policy, rules))
    for at, parent in enumerate(parents):
        tenant = "first" if at in first else "kept" if at % 4 == 3 else ""
        manager.stored(replace(view(at, parent), tenant_tag=tenant), 0.0)
    pinned &= set(range(len(parents)))
    for at in pinned:
        manager.pin(key(at), Part.FULL)
    leaving = [number(page) for page in manager.victims(bytes_needed, 9.0)]
    assert len(leaving) == min(bytes_needed, len(parents) - len(pinned))
    assert len(set(leaving)) == len(leaving)
    for at, page in enumerate(leaving):
        after = {child for child, parent in enumerate(parents) if parent == page}
        assert after - pinned <= set(leaving[:at])


def test_a_page_that_is_proposed_too_early_leaves_with_the_last_of_those_after_it() -> None:
    manager = RetentionManager(Odd(lambda _: [(key(at), Part.FULL) for at in (0, 1, 9, 3, 2, 8)]))
    for at, parent in ((0, None), (1, 0), (2, 1), (3, 1), (8, None), (9, None)):
        manager.stored(view(at, parent), 0.0)
    assert chosen(manager, 2) == [9, 3]
    assert chosen(manager, 4) == [9, 3, 2, 1]
    assert chosen(manager, 9) == [9, 3, 2, 1, 0, 8]
    assert manager.counts.fallbacks == 0


numbers = st.integers(0, 9)
POLICIES: dict[str, Callable[[], RetentionPolicy | None]] = {
    "lru": lambda: None,
    "raising": Raising,
    "raising late": RaisingLate,
    **{name: functools.partial(Odd, proposals) for name, proposals in NONSENSE.items()},
}


class ManagerAgainstAModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.pins: dict[int, int] = {}

    @initialize(policy=st.sampled_from(list(POLICIES)))
    def begin(self, policy: str) -> None:
        # Two of them, told the same: what they answer must not depend on anything else.
        self.manager = RetentionManager(POLICIES[policy]())
        self.twin = RetentionManager(POLICIES[policy]())

    def both(self) -> tuple[RetentionManager, RetentionManager]:
        return self.manager, self.twin

    @rule(at=numbers, parent=st.none() | numbers, size=st.integers(1, 5))
    def store(self, at: int, parent: int | None, size: int) -> None:
        self.sizes.setdefault(at, size)
        for manager in self.both():
            manager.stored(view(at, parent, size=size), 0.0)

    @rule(at=numbers)
    def hit(self, at: int) -> None:
        for manager in self.both():
            manager.hit(key(at), Part.FULL, 0.0)

    @rule(at=numbers)
    def remove(self, at: int) -> None:
        self.sizes.pop(at, None)
        self.pins.pop(at, None)
        for manager in self.both():
            manager.removed(key(at), Part.FULL)

    @rule(at=numbers)
    def pin(self, at: int) -> None:
        for manager in self.both():
            assert manager.pin(key(at), Part.FULL) == (at in self.sizes)
        if at in self.sizes:
            self.pins[at] = self.pins.get(at, 0) + 1

    @rule(at=numbers)
    def unpin(self, at: int) -> None:
        if at not in self.pins:
            return
        for manager in self.both():
            manager.unpin(key(at), Part.FULL)
        self.pins[at] -= 1
        if not self.pins[at]:
            del self.pins[at]

    @rule(bytes_needed=st.integers(-1, 60), carry_out=st.booleans())
    def ask(self, bytes_needed: int, carry_out: bool) -> None:
        victims = self.manager.victims(bytes_needed, 0.0)
        assert victims == self.twin.victims(bytes_needed, 0.0)
        leaving = [number(page) for page in victims]
        unpinned = self.sizes.keys() - self.pins.keys()
        assert len(set(leaving)) == len(leaving)
        assert set(leaving) <= unpinned
        freed = sum(self.sizes[at] for at in leaving)
        assert freed >= bytes_needed or set(leaving) == unpinned
        if leaving:
            assert freed - self.sizes[leaving[-1]] < bytes_needed
        if carry_out:
            for at in leaving:
                self.remove(at)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        assert self.manager.used_bytes == sum(self.sizes.values())
        assert self.manager.pinned_bytes == sum(self.sizes[at] for at in self.pins)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="pie.policies.manager")


TestManagerAgainstAModel = ManagerAgainstAModel.TestCase
TestManagerAgainstAModel.settings = settings(max_examples=200)

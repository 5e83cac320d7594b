"""Ending a policy that does not come back: loops of Python end, and nothing else is hit."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.aside import AsidePolicy
from pie.policies.cluster_manager import Asked, ClusterManager
from pie.policies.cluster_policy import ClusterView, Order
from pie.policies.ending import Endable, PolicyEndedError
from pie.policies.errors import PolicyStalledError
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView
from pie.router.aside import AskedAside
from tests.policies.pages import key, view

LONG_S = 60.0
"""Long enough for a busy machine; no test waits for it."""
VIEW = ClusterView(4, 1, (), 0.0)


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


class Loops(LruRetention):
    """Never comes back from `at`, unless it is let go."""

    def __init__(self, at: str, *, catches: bool = False) -> None:
        super().__init__()
        self.at = at
        self.catches = catches
        self.is_let_go = False
        self.began = threading.Event()
        self.caught = threading.Event()

    def loop(self) -> None:
        self.began.set()
        while not self.is_let_go:
            try:
                while not self.is_let_go:
                    pass
            except BaseException:
                if not self.catches:
                    raise
                self.caught.set()

    def stored(self, page: PageView, now_s: float) -> None:
        super().stored(page, now_s)
        if self.at == "stored":
            self.loop()

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        self.loop()
        yield from super().victims(bytes_needed, now_s)

    def decide(self, view: ClusterView) -> Iterable[Order]:
        self.loop()
        return ()


def aside_of(policy: Loops, ends_s: float = 0.1) -> tuple[AsidePolicy, threading.Thread]:
    before = set(threading.enumerate())
    one = AsidePolicy(policy, ends_s=ends_s)
    (thread,) = set(threading.enumerate()) - before
    return one, thread


def ask(one: AsidePolicy) -> str:
    with pytest.raises(PolicyStalledError) as told:
        one.victims(1, 0.0)
    return str(told.value)


def ask_until_it_begins(one: AsidePolicy, policy: Loops) -> str:
    """Ask, again where the policy had not begun when nobody waited any more: then it never does."""
    told = ask(one)
    while not policy.began.wait(0.2):
        if "was ended" in ask(one):
            # As it was about to begin.
            break
    return told


def test_a_question_that_is_never_answered_ends_and_is_not_put_again() -> None:
    policy = Loops("victims")
    one, thread = aside_of(policy)
    one.stored(view(1), 0.0)
    assert "has not answered in 1 ms" in ask_until_it_begins(one, policy)
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert ask(one) == "it had not come back in 0.1 s, was ended, and is not asked again"


class LoopsAfterEvents(Loops):
    """Takes some time for an event, and for ever for a question."""

    def __init__(self) -> None:
        super().__init__("victims")
        self.go_on = threading.Event()

    def stored(self, page: PageView, now_s: float) -> None:
        super().stored(page, now_s)
        self.go_on.wait()


def test_a_question_that_nobody_waits_for_any_more_is_not_begun() -> None:
    policy = LoopsAfterEvents()
    one, thread = aside_of(policy, ends_s=LONG_S)
    one.stored(view(1), 0.0)
    assert "has not answered in 1 ms" in ask(one)
    policy.go_on.set()
    until(lambda: not one._desk._is_busy)
    assert not policy.began.is_set()
    # The next one is, and ended.
    one._desk._ends_s = 0.1
    assert "has not answered in 1 ms" in ask_until_it_begins(one, policy)
    until(lambda: "was ended, and is not asked again" in ask(one))
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_an_event_that_is_never_over_ends_at_a_later_one() -> None:
    one, thread = aside_of(Loops("stored"))
    one.stored(view(1), 0.0)

    def has_ended() -> bool:
        one.removed(key(2), Part.FULL)
        return not thread.is_alive()

    until(has_ended)
    assert "was ended, and is not asked again" in ask(one)


def test_the_built_in_answers_before_and_after() -> None:
    policy = Loops("victims")
    one, thread = aside_of(policy)
    manager = RetentionManager(one)
    for at in range(4):
        manager.stored(view(at), 0.0)
    asked = 0
    while thread.is_alive() or asked < 2:
        assert [page for page, _ in manager.victims(2, 0.0)] == [key(0), key(1)]
        asked += 1
        if policy.began.wait(0.2):
            thread.join(LONG_S)
            assert not thread.is_alive()
    assert manager.counts.failures == manager.counts.fallbacks == asked


def test_one_that_catches_whatever_comes_goes_on_and_holds_up_nobody() -> None:
    policy = Loops("victims", catches=True)
    one, thread = aside_of(policy)
    assert "has not answered in 1 ms" in ask_until_it_begins(one, policy)
    assert policy.caught.wait(LONG_S)
    assert thread.is_alive()
    assert ask(one) == "it has not answered an earlier question"
    policy.is_let_go = True
    thread.join(LONG_S)
    assert not thread.is_alive()
    assert "is not asked again" in ask(one), "it is in no known state"


def test_one_that_is_replaced_ends_at_once() -> None:
    policy = Loops("victims")
    one, thread = aside_of(policy)
    ask_until_it_begins(one, policy)
    del one
    thread.join(LONG_S)
    assert not thread.is_alive()


async def test_a_cluster_policy_that_never_answers_ends_and_that_is_told_once() -> None:
    manager = ClusterManager([("loops", Loops("decide"))])
    aside = AskedAside(1, ends_s=0.5)
    before = set(threading.enumerate())
    questions = [lambda: manager.ask(0, VIEW)]
    answers, late = await aside.ask(questions, 0.001)
    assert (answers, late) == ([], [0])
    (thread,) = set(threading.enumerate()) - before
    await asyncio.to_thread(thread.join, LONG_S)
    assert not thread.is_alive()
    async with asyncio.timeout(LONG_S):
        while not answers:
            answers, late = await aside.ask(questions, 0.001)
            assert not late
    (told,) = answers
    assert told.failures == ("it had not come back in 0.5 s, was ended, and is not asked again",)
    assert await aside.ask(questions, 0.001) == ([], [])


async def test_nothing_is_due_for_a_question_that_no_thread_could_be_started_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    aside, due = AskedAside(1), list[object]()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "call_later", lambda *what: due.append(what))
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            await aside.ask([lambda: Asked(0)], 1.0)
    assert due == []
    assert await aside.ask([lambda: Asked(0)], LONG_S) == ([Asked(0)], [])


def test_an_end_that_comes_as_a_call_returns_hits_nothing_after_it() -> None:
    now = Endable()
    left: list[str] = []
    told = runs = 0

    def work() -> None:
        nonlocal now, told, runs
        while told < 200 and runs < 50_000:
            now = one = Endable()
            runs += 1
            try:
                with contextlib.suppress(PolicyEndedError):
                    one.run(lambda: [str(number) for number in range(50)])
                assert not one.end(), "it would end what this thread does next"
                for number in range(20):
                    str(number)
            except BaseException as error:  # noqa: BLE001 - none may come
                left.append(repr(error))
            told += one.was_ended

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=work)
    try:
        thread.start()
        while thread.is_alive():
            now.end()
    finally:
        sys.setswitchinterval(interval_s)
        thread.join(LONG_S)
    assert told
    assert not left
    assert not Endable().end(), "nothing runs there"


def test_code_is_traced_as_ever_after_a_policy_was_ended() -> None:
    policy = Loops("victims")
    one, thread = aside_of(policy)
    ask_until_it_begins(one, policy)
    thread.join(LONG_S)
    assert not thread.is_alive()
    endable, lines = Endable(), 0

    def count(_frame: object, event: str, _argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return count

    def work() -> int:
        endable.end()
        return sum(range(10))

    with contextlib.suppress(PolicyEndedError):
        endable.run(work)

    def traced() -> int:
        return sum(range(10))

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        traced()
    finally:
        sys.settrace(before)
    assert 0 < lines < 100

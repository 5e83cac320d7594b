"""A user's policy on a thread of its own: asked by a deadline, contained, given up where it must be."""

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies import aside
from pie.policies.aside import AsidePolicy
from pie.policies.errors import PolicyStalledError
from pie.policies.loader import load_policies
from pie.policies.lru import LruRetention
from pie.policies.manager import RetentionManager
from pie.policies.retention import PageView
from tests.policies.pages import key, number, view

LONG_S = 60.0
"""Long enough for a busy machine; no test waits for it."""


class Newest:
    """The page stored last leaves first. Waits at `gate` where that is closed."""

    def __init__(self) -> None:
        self.held: dict[tuple[PageKey, Part], None] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()

    def stored(self, page: PageView, now_s: float) -> None:
        self.gate.wait()
        self.held[page.key, page.part] = None

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        raise RuntimeError("hit")

    def removed(self, key: PageKey, part: Part) -> None:
        self.held.pop((key, part), None)

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        self.threads.add(threading.current_thread().name)
        self.gate.wait()
        while True:
            yield from reversed(self.held)


@pytest.fixture
def policy() -> Iterator[Newest]:
    policy = Newest()
    yield policy
    policy.gate.set()


def numbers(pages: Iterable[tuple[PageKey, Part]]) -> list[int]:
    return [number(page) for page in pages]


def test_it_answers_from_another_thread_after_all_events(policy: Newest) -> None:
    manager = RetentionManager(AsidePolicy(policy, deadline_s=LONG_S))
    for at in range(500):
        manager.stored(view(at), 0.0)
    manager.removed(key(499), Part.FULL)
    assert numbers(manager.victims(3, 0.0)) == [498, 497, 496]
    assert policy.threads == {"pie-policy"}
    assert manager.counts.failures == manager.counts.fallbacks == 0


class Counted(Newest):
    """Proposes for as long as anybody reads, and notes how many and where it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.proposed = 0
        self.ended_in: list[str] = []

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        try:
            for page in reversed(self.held):
                self.proposed += 1
                yield page
        finally:
            self.ended_in.append(threading.current_thread().name)


def test_few_more_proposals_are_taken_than_needed_and_the_rest_is_broken_off_in_its_thread() -> (
    None
):
    policy = Counted()
    manager = RetentionManager(AsidePolicy(policy, deadline_s=LONG_S))
    for at in range(2_000):
        manager.stored(view(at), 0.0)
    assert numbers(manager.victims(3, 0.0)) == [1999, 1998, 1997]
    assert policy.proposed <= 64
    # One that takes several turns, and one that takes all there is.
    assert numbers(manager.victims(1_000, 0.0)) == list(range(1999, 999, -1))
    assert policy.proposed <= 64 + 64 + 128 + 256 + 512 + 1_024
    assert len(manager.victims(5_000, 0.0)) == 2_000
    assert policy.ended_in == ["pie-policy"] * 3
    assert manager.counts.failures == manager.counts.fallbacks == 0


class Slowing(Newest):
    """Proposes the pages of two turns at once, and no more until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.proposed = 0

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        for self.proposed, page in enumerate(reversed(self.held)):  # noqa: B020 - it counts
            if self.proposed == 192:
                self.go_on.wait()
            yield page


def test_all_turns_have_one_deadline_and_what_came_in_time_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Slowing()
    one = AsidePolicy(policy, deadline_s=LONG_S, ends_s=LONG_S)
    manager = RetentionManager(one)
    limits_s, put = list[float](), one._desk.ask

    def ask(question: Any, close: Any, limit_s: float, deadline_s: float) -> Any:
        limits_s.append(limit_s)
        # Nobody waits for the end of what is not going to come.
        return put(question, close, 0.01 if len(limits_s) == 3 else limit_s, deadline_s)

    monkeypatch.setattr(one._desk, "ask", ask)
    for at in range(400):
        manager.stored(view(at), 0.0)
    until(lambda: len(policy.held) == 400)
    assert numbers(manager.victims(194, 0.0)) == [*range(399, 207, -1), 0, 1]
    assert manager.counts.failures == manager.counts.fallbacks == 1
    assert LONG_S == limits_s[0] > limits_s[1] > limits_s[2]
    policy.go_on.set()


def test_one_that_hangs_is_waited_for_once_and_lru_answers(
    policy: Newest, caplog: pytest.LogCaptureFixture
) -> None:
    policy.gate.clear()
    manager = RetentionManager(AsidePolicy(policy), name="device")
    for at in range(4):
        manager.stored(view(at), 0.0)
    with caplog.at_level(logging.ERROR, logger="pie.policies.manager"):
        for _ in range(3):
            assert numbers(manager.victims(2, 0.0)) == [0, 1]
    assert manager.counts.failures == manager.counts.fallbacks == 3
    said = (
        f"device: {__name__}:Newest failed in victims(): it has not answered in 1 ms; `lru` decides"
    )
    assert said in caplog.text
    assert "Traceback" not in caplog.text


def test_it_is_asked_again_once_it_has_answered(policy: Newest) -> None:
    policy.gate.clear()
    one = AsidePolicy(policy, deadline_s=0.001, ends_s=LONG_S)
    one.stored(view(1), 0.0)
    with pytest.raises(PolicyStalledError, match="in 1 ms"):
        one.victims(1, 0.0)
    with pytest.raises(PolicyStalledError, match="an earlier question"):
        one.victims(1, 0.0)
    policy.gate.set()
    answered = threading.Event()

    def ask() -> None:
        while not answered.is_set():
            try:
                if number(next(iter(one.victims(1, 0.0)))) == 1:
                    answered.set()
            except PolicyStalledError:
                continue

    asking = threading.Thread(target=ask)
    asking.start()
    assert answered.wait(LONG_S)
    asking.join(LONG_S)


def test_what_it_raises_at_an_event_is_told_at_the_next_question(policy: Newest) -> None:
    manager = RetentionManager(AsidePolicy(policy, deadline_s=LONG_S))
    manager.stored(view(1), 0.0)
    manager.hit(key(1), Part.FULL, 0.0)
    assert numbers(manager.victims(1, 0.0)) == [1]
    assert manager.counts.failures == 1
    assert numbers(manager.victims(1, 0.0)) == [1]
    assert manager.counts.failures == 1


def test_one_that_falls_too_far_behind_is_given_up(
    policy: Newest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aside, "MOST_WAITING", 10)
    policy.gate.clear()
    one = AsidePolicy(policy)
    for at in range(20):
        one.stored(view(at), 0.0)
    with pytest.raises(PolicyStalledError, match="too far behind"):
        one.victims(1, 0.0)


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    one = AsidePolicy(Newest())
    (thread,) = set(threading.enumerate()) - before
    del one
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def watching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pie-policy-watch"]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def late(one: AsidePolicy, policy: Newest) -> None:
    """Let a question be answered after its deadline."""
    policy.gate.clear()
    with pytest.raises(PolicyStalledError, match="in 1 ms"):
        one.victims(1, 0.0)
    policy.gate.set()
    until(lambda: not one._desk._is_busy)


def test_one_that_is_late_again_and_again_is_watched_by_one_thread(policy: Newest) -> None:
    before = set(threading.enumerate())
    one = AsidePolicy(policy, ends_s=LONG_S)
    one.stored(view(1), 0.0)
    for _ in range(20):
        late(one, policy)
    assert len(set(threading.enumerate()) - before) == 2
    assert len(watching()) == 1
    del one
    gc.collect()
    until(lambda: not watching())


def test_one_that_has_answered_is_watched_no_more(policy: Newest) -> None:
    one = AsidePolicy(policy, ends_s=0.5)
    one.stored(view(1), 0.0)
    late(one, policy)
    until(lambda: not watching())
    assert not one._desk._is_watched


def test_only_users_policies_are_put_aside() -> None:
    policies = load_policies("worker: {retention: lru}", name="p.yaml")
    assert type(policies.new_retention_aside()) is LruRetention
    own = load_policies(
        "worker: {retention: 'tests.policies.test_aside:Newest'}", name="p.yaml"
    ).new_retention_aside()
    assert isinstance(own, AsidePolicy)

"""A user's routing policy that is slow, hangs or fails holds up nobody."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from pie.page.events import PlaceId
from pie.policies import routing_aside
from pie.policies.errors import PolicyStalledError
from pie.policies.loader import load_policies
from pie.policies.routing import Choice, RequestView, RoutingPolicy, WorkerView
from pie.policies.routing_aside import AsideRouting
from pie.policies.routing_cost import CostRouting

LONG_S = 60.0
REQUEST = RequestView("r", 16, 16, None, (), 0)
MINE = Choice(PlaceId("w1"), ())


class Does:
    """A policy that does something, then chooses `MINE`."""

    def __init__(self, what: Callable[[], object]) -> None:
        self.what = what
        self.times = 0

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        self.times += 1
        self.what()
        return MINE


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def stalled(one: RoutingPolicy) -> str:
    with pytest.raises(PolicyStalledError) as told:
        one.choose(REQUEST, ())
    return str(told.value)


def test_it_chooses_on_another_thread() -> None:
    threads: list[threading.Thread] = []
    one = AsideRouting(Does(lambda: threads.append(threading.current_thread())), deadline_s=LONG_S)
    assert one.choose(REQUEST, ()) is MINE
    assert one.choose(REQUEST, ()) is MINE
    assert len(set(threads)) == 1
    assert threads[0] is not threading.current_thread()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), TimeoutError("mine")])
def test_what_it_raises_is_raised_and_it_is_asked_again(error: BaseException) -> None:
    def fail() -> None:
        raise error

    policy = Does(fail)
    one = AsideRouting(policy, deadline_s=LONG_S)
    for _ in range(2):
        with pytest.raises(type(error)):
            one.choose(REQUEST, ())
    policy.what = lambda: None
    assert one.choose(REQUEST, ()) is MINE


def test_one_that_hangs_is_asked_once_and_again_when_it_has_come_back() -> None:
    go_on = threading.Event()
    policy = Does(lambda: go_on.wait(LONG_S))
    one = AsideRouting(policy, deadline_s=0.01, pause_s=0.0, ends_s=LONG_S)
    assert "has not chosen in 10 ms" in stalled(one)
    for _ in range(5):
        assert "has not chosen for an earlier request" in stalled(one)
    assert policy.times == 1
    go_on.set()

    def is_back() -> bool:
        try:
            return one.choose(REQUEST, ()) is MINE
        except PolicyStalledError:
            return False

    until(is_back)


class JustTooLate(Future[Choice]):
    """Is settled after a wait for it has timed out, and before anybody looks again."""

    def result(self, timeout: float | None = None) -> Choice:
        if timeout is None:
            return super().result()
        self.exception(LONG_S)
        raise TimeoutError


def test_a_choice_that_comes_at_the_deadline_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_aside, "Future", JustTooLate)
    one = AsideRouting(Does(lambda: None))
    for _ in range(2):
        assert one.choose(REQUEST, ()) is MINE


def test_one_that_was_late_is_left_alone_for_a_while() -> None:
    go_on = threading.Event()
    policy = Does(lambda: go_on.wait(LONG_S))
    one = AsideRouting(policy, deadline_s=0.01, pause_s=LONG_S)
    stalled(one)
    go_on.set()
    assert one._asked is not None
    assert one._asked.result(LONG_S) is MINE
    assert "earlier request" in stalled(one)
    assert policy.times == 1


def test_one_that_never_comes_back_is_ended() -> None:
    def forever() -> None:
        while True:
            time.sleep(0)

    one = AsideRouting(Does(forever), deadline_s=0.01, ends_s=0.1)
    stalled(one)
    until(lambda: "was ended, and is not asked again" in stalled(one))
    assert one._asked is not None
    assert one._asked.exception(LONG_S) is not None


def test_its_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    one = AsideRouting(Does(lambda: None), deadline_s=LONG_S)
    one.choose(REQUEST, ())
    (thread,) = set(threading.enumerate()) - before
    del one
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_built_in_policies_are_asked_at_once_and_a_users_aside() -> None:
    built_in = load_policies("cluster: {routing: cost}", name="f")
    own = load_policies("cluster: {routing: 'pie.simulator.peers:DynamoCost'}", name="f")
    assert isinstance(built_in.new_routing_aside(), CostRouting)
    assert isinstance(own.new_routing_aside(), AsideRouting)

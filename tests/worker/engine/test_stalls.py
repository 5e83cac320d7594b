from __future__ import annotations

import pytest

from pie.worker.stalls import Stalls
from tests.worker.engine.clock import Clock, stopped


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stopped(monkeypatch)


def test_those_who_lose_beside_each_other_are_one_stall(clock: Clock) -> None:
    stalls, asked_s = Stalls("disk"), clock.monotonic()
    for _ in range(10):
        clock.sleep(0.01)
        stalls.gave_up(asked_s)
    assert stalls.is_paused
    assert stalls.next_s == 2.0
    clock.sleep(0.9)
    assert stalls.is_paused
    clock.sleep(0.1)
    assert not stalls.is_paused


def test_it_is_none_where_others_got_something_meanwhile(clock: Clock) -> None:
    stalls, asked_s = Stalls("disk"), clock.monotonic()
    clock.sleep(0.01)
    stalls.answered()
    stalls.gave_up(asked_s)
    assert not stalls.is_paused


def test_each_pause_is_twice_as_long_until_something_comes(clock: Clock) -> None:
    stalls = Stalls("disk")
    for longer_s in (2.0, 4.0, 8.0):
        clock.sleep(longer_s)
        stalls.gave_up(clock.monotonic())
        assert stalls.next_s == longer_s
    stalls.answered()
    assert stalls.next_s == 1.0

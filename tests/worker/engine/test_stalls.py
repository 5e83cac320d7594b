from __future__ import annotations

import time

from pie.worker.stalls import Stalls


def test_those_who_lose_beside_each_other_are_one_stall() -> None:
    stalls, asked_s = Stalls("disk"), time.monotonic()
    for _ in range(10):
        stalls.gave_up(asked_s)
    assert stalls.is_paused
    assert stalls.next_s == 2.0


def test_it_is_none_where_others_got_something_meanwhile() -> None:
    stalls, asked_s = Stalls("disk"), time.monotonic()
    stalls.answered()
    stalls.gave_up(asked_s)
    assert not stalls.is_paused


def test_each_pause_is_twice_as_long_until_something_comes() -> None:
    stalls = Stalls("disk")
    for longer_s in (2.0, 4.0, 8.0):
        stalls.until_s = 0.0
        stalls.gave_up(time.monotonic())
        assert stalls.next_s == longer_s
    stalls.answered()
    assert stalls.next_s == 1.0

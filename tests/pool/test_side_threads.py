from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import CancelledError

import pytest

from pie.pool.side_threads import SideThreads, within


def test_it_does_one_thing_after_another_and_hands_back_what_came() -> None:
    thread = SideThreads("side")
    done: list[int] = []
    futures = [thread.submit(done.append, number) for number in range(5)]
    assert thread.submit(int, "7").result(60) == 7
    assert done == [0, 1, 2, 3, 4]
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="invalid literal"):
        thread.submit(int, "x").result(60)
    assert thread.close()


def test_several_do_several_things_at_once_and_no_more_start_than_are_needed() -> None:
    threads = SideThreads("side", 3)
    assert threads.submit(int, "7").result(60) == 7
    assert len(threads._threads) == 1
    meeting = threading.Barrier(3)
    met = [threads.submit(meeting.wait, 60) for _ in range(3)]
    assert {each.result(60) for each in met} == {0, 1, 2}
    waiting = [threads.submit(int, str(number)) for number in range(9)]
    assert [each.result(60) for each in waiting] == list(range(9))
    assert len(threads._threads) == 3
    assert threads.close()


def test_one_that_hangs_is_left_behind_and_what_waited_is_given_up() -> None:
    began, over = threading.Event(), threading.Event()
    thread = SideThreads("side")

    def hang() -> None:
        began.set()
        over.wait(120)

    thread.submit(hang)
    waiting = thread.submit(int)
    assert began.wait(60)
    assert not thread.close(0.01)
    over.set()
    with pytest.raises(CancelledError):
        waiting.result(60)
    with pytest.raises(RuntimeError, match="side has been closed"):
        thread.submit(int)


def test_work_is_left_behind_at_its_limit() -> None:
    over = threading.Event()

    def hang() -> None:
        over.wait(120)

    assert not within(0.01, "side", hang)
    over.set()
    assert within(60, "side", hang)


def test_one_that_hangs_does_not_hold_the_process() -> None:
    program = (
        "import threading\n"
        "from pie.pool.side_threads import SideThreads\n"
        "SideThreads('side').submit(threading.Event().wait)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)

"""The guard: what belongs to a run ends with it, and nothing else does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pie.cluster.guard import MARK_VARIABLE, clean_up

ANOTHER_RUN = f"another run {uuid.uuid4().hex}"
"""Of this process alone: a test elsewhere on this machine ends what carries its own."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder, with a file in it."""
    made = tmp_path / "run"
    made.mkdir()
    (made / "file").write_text("")
    return made


class Guarded:
    """A process that has a guard, its child that carries the mark, and one from before the run."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.cluster.guarded_process", mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        child, earlier = self._answer().split()
        self.child, self.earlier = psutil.Process(int(child)), psutil.Process(int(earlier))

    def ask(self, command: str) -> str:
        """Send a command and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End it and wait until its guard has ended its child."""
        self.process.kill()
        # It has the pipes too.
        self.earlier.kill()
        self.process.communicate()
        until(lambda: ended(self.child))

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def guarded(folder: Path) -> Iterator[Guarded]:
    one = Guarded("a run of tests", folder)
    yield one
    one.close()


@pytest.fixture
def bystander() -> Iterator[psutil.Process]:
    """A process that carries another mark."""
    process = subprocess.Popen(["sleep", "300"], env={**os.environ, MARK_VARIABLE: ANOTHER_RUN})
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_released_guard_ends_its_run_and_nothing_else(
    guarded: Guarded, bystander: psutil.Process, folder: Path
) -> None:
    guarded.ask("release 20")
    assert ended(guarded.child)
    assert not ended(bystander)
    assert not folder.exists()


def test_a_guard_whose_starter_was_killed_does_the_same(
    guarded: Guarded, bystander: psutil.Process, folder: Path
) -> None:
    guarded.process.kill()
    until(lambda: ended(guarded.child) and not folder.exists())
    assert not ended(bystander)


@pytest.mark.parametrize("halted", [False, True])
def test_what_the_starter_had_before_its_run_is_left_alone(
    guarded: Guarded, folder: Path, halted: bool
) -> None:
    if halted:
        os.kill(int(guarded.ask("pid")), signal.SIGSTOP)
    guarded.ask(f"release {0.2 if halted else 20}")
    assert ended(guarded.child)
    assert not ended(guarded.earlier)
    assert not folder.exists()


def test_a_guard_that_was_killed_is_started_again(guarded: Guarded, folder: Path) -> None:
    before = guarded.ask("pid")
    assert guarded.ask("watch") == "False"
    os.kill(int(before), signal.SIGKILL)
    until(lambda: guarded.ask("watch") == "True")
    assert guarded.ask("pid") != before
    guarded.ask("release 20")
    assert ended(guarded.child)
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_where_the_guard_does_not_clean_up_its_starter_does(
    guarded: Guarded, folder: Path, number: int
) -> None:
    os.kill(int(guarded.ask("pid")), number)
    guarded.ask("release 0.2")
    assert ended(guarded.child)
    assert not folder.exists()


def test_a_halted_process_is_ended_too(bystander: psutil.Process, folder: Path) -> None:
    until(lambda: bystander.environ().get(MARK_VARIABLE) == ANOTHER_RUN)
    bystander.suspend()
    clean_up(ANOTHER_RUN, folder)
    assert ended(bystander)


def test_a_folder_that_is_made_anew_is_removed_again(folder: Path) -> None:
    def make_anew() -> None:
        until(lambda: not folder.exists())
        (folder / "ray" / "session").mkdir(parents=True)

    thread = threading.Thread(target=make_anew)
    thread.start()
    clean_up("nobody's run", folder)
    thread.join()
    assert not folder.exists()


def test_a_guard_whose_starter_is_gone_takes_nobody_elses_processes(
    bystander: psutil.Process, folder: Path
) -> None:
    # This test's process is the parent of both, as init is of whatever lost its own.
    command = [
        sys.executable,
        "-m",
        "pie.cluster.guard",
        "999999999",
        f"a lost run {uuid.uuid4().hex}",
        str(folder),
    ]
    subprocess.run(command, stdin=subprocess.DEVNULL, timeout=120, check=True)
    assert not ended(bystander)
    assert not folder.exists()

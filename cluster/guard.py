"""The guard: leaves nothing behind, whatever ends the process that started a cluster.

`Guard` starts a small process of its own session that waits on a pipe. When the pipe closes,
because the cluster stopped or because its starter was killed, the guard ends every process of the
run and removes the run's temporary folder. So there is one way to clean up, and `SIGKILL` at any
moment of the start takes it too.

A process belongs to the run when it carries the run's mark in its environment, or was once seen
below the starter and was not there before the run: Ray's processes write their title over their
environment, and those whose parent died are nobody's children.

Run as `python -m pie.cluster.guard PID MARK FOLDER [PROCESS …]`, by process PID, each PROCESS one
that was there before. Does not cover stopping in good order
(`pie.cluster.launch`): what is still there when the guard acts is ended at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

MARK_VARIABLE = "PIE_RUN"
"""Environment variable that every process of a run inherits."""

_START_S = 60.0
_STARTING_LOOK_S = 0.25
_LOOK_S = 2.0
"""How often the guard looks for new processes; a look takes 5 ms."""

_SWEEPS = 100
_SWEEP_PAUSE_S = 0.1
_CLEAN_SWEEPS = 3
"""Sweeps in a row that find nothing, after which nothing is taken to come any more."""
_GRACE_S = 2.0


class Guard:
    """A process that cleans up after this one.

    Args:
        mark: Value of `PIE_RUN` in the environment of every process of the run.
        folder: The run's temporary folder.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        self._mark = mark
        self._folder = folder
        self._before = _descendants(psutil.Process())
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The guard's process."""
        return self._process.pid

    def watch(self) -> bool:
        """Start a guard anew where it was killed; say whether that was so."""
        if self._process.poll() is None:
            return False
        self._end()
        self._process = self._start()
        return True

    def release(self, timeout_s: float = 20.0) -> None:
        """Let the guard clean up, and wait until it has; clean up here where it does not."""
        if self._end(timeout_s) != 0:
            seen = _descendants(psutil.Process()) - self._before
            clean_up(self._mark, self._folder, seen)

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k != MARK_VARIABLE}
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "pie.cluster.guard",
                str(os.getpid()),
                self._mark,
                str(self._folder),
                *map(_name, self._before),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def _end(self, timeout_s: float = 0.0) -> int:
        """Close the pipe, wait for the end, and return the exit code; negative where it was killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def marked_processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that carry `mark`, this one left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # Gone meanwhile, or another user's.
    return found


def kill_marked(pid: int | None, mark: str) -> None:
    """Kill a process of a run on this host; another that has its number, here or elsewhere, is left alone."""
    with contextlib.suppress(psutil.Error):
        if pid is not None and psutil.Process(pid).environ().get(MARK_VARIABLE) == mark:
            psutil.Process(pid).kill()


def clean_up(
    mark: str,
    folder: Path,
    seen: Iterable[psutil.Process] = (),
    spare_pid: int | None = None,
) -> None:
    """End every process of a run and remove `folder`.

    Args:
        mark: Value of `PIE_RUN`.
        folder: The run's temporary folder.
        seen: Processes that belong to the run whether or not they carry the mark.
        spare_pid: The process that started the run, which ends by itself.
    """
    seen = set(seen)
    asked_at_s = time.monotonic()
    clean = 0
    for _ in range(_SWEEPS):
        for process in [*seen]:
            seen |= _descendants(process)
        left = [
            process
            for process in {*seen, *marked_processes(mark)}
            if process.pid not in {spare_pid, os.getpid()} and _lives(process)
        ]
        late = time.monotonic() - asked_at_s > _GRACE_S
        for process in left:
            try:
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            except psutil.Error:
                continue
        if left:
            psutil.wait_procs(left, timeout=_SWEEP_PAUSE_S)
        # A process that was starting may write into the folder once more, and so make it anew.
        clean = 0 if left or folder.exists() else clean + 1
        if clean >= _CLEAN_SWEEPS:
            return
        if not left:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(_SWEEP_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the pipe on standard input to close, then clean up."""
    pid, mark, folder, *before = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    starter = _starter(int(pid))
    seen: set[psutil.Process] = set()
    started_s = time.monotonic()
    open_ = True
    while open_:
        if starter is not None:
            below = {one for one in _descendants(starter) if _name(one) not in before}
            seen = {process for process in seen | below if _lives(process)}
        starting = time.monotonic() - started_s < _START_S
        ready, _, _ = select.select([sys.stdin], [], [], _STARTING_LOOK_S if starting else _LOOK_S)
        open_ = not ready or bool(sys.stdin.buffer.read(1))
    clean_up(mark, Path(folder), seen, spare_pid=int(pid))


def _starter(pid: int) -> psutil.Process | None:
    """Return the process that started this one, or None where it is gone already.

    Whoever took its place as our parent is the parent of much else.
    """
    try:
        starter = psutil.Process(pid)
    except psutil.Error:
        return None
    return starter if os.getppid() == pid else None


def _descendants(process: psutil.Process) -> set[psutil.Process]:
    try:
        return set(process.children(recursive=True)) - {psutil.Process()}
    except psutil.Error:
        return set()


def _name(process: psutil.Process) -> str:
    """Return what names a process for as long as the machine is up: pids come again."""
    try:
        return f"{process.pid}@{process.create_time()}"
    except psutil.Error:
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    main()

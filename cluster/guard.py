"""The guard: leaves nothing behind, whatever ends the process that started a cluster.

`Guard` starts a small process of its own session that waits on a pipe. When the pipe closes,
because the cluster stopped or because its starter was killed, the guard ends every process that
carries the run's mark in its environment and removes the run's temporary folder. So there is one
way to clean up, and `SIGKILL` at any moment of the start takes it too.

Run as `python -m pie.cluster.guard MARK FOLDER`. Does not cover stopping in good order
(`pie.cluster.launch`): what is still there when the guard acts is ended at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

MARK_VARIABLE = "PIE_RUN"
"""Environment variable that every process of a run inherits."""

_SWEEPS = 50
_SWEEP_PAUSE_S = 0.1
_GRACE_S = 2.0


class Guard:
    """A process that cleans up after this one.

    Args:
        mark: Value of `PIE_RUN` in the environment of every process of the run.
        folder: The run's temporary folder.
    """

    def __init__(self, mark: str, folder: Path) -> None:
        environment = {k: v for k, v in os.environ.items() if k != MARK_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pie.cluster.guard", mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )

    def release(self, timeout_s: float = 20.0) -> None:
        """Let the guard clean up, and wait until it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


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


def clean_up(mark: str, folder: Path, spare_pid: int | None = None) -> None:
    """End every process that carries `mark` and remove `folder`.

    Args:
        mark: Value of `PIE_RUN`.
        folder: The run's temporary folder.
        spare_pid: The process that started the run, which ends by itself.
    """
    asked_at_s = time.monotonic()
    for _ in range(_SWEEPS):
        left = [p for p in marked_processes(mark) if p.pid != spare_pid]
        if not left:
            break
        late = time.monotonic() - asked_at_s > _GRACE_S
        for process in left:
            try:
                process.send_signal(signal.SIGKILL if late else signal.SIGTERM)
            except psutil.Error:
                continue
        psutil.wait_procs(left, timeout=_SWEEP_PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Wait for the pipe on standard input to close, then clean up."""
    mark, folder = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    starter = os.getppid()
    while sys.stdin.buffer.read(1):
        pass
    clean_up(mark, Path(folder), spare_pid=starter)


if __name__ == "__main__":
    main()

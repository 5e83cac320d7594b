"""A contestant's process: it stands still while another one's is measured."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

_START_S = 900.0
_CASE_S = 300.0
_END_S = 30.0


class Process:
    """One contestant. Runs only inside `awake`.

    Args:
        command: What starts it.
        environment: All of it.
        log: Takes what it writes beside its answers.
    """

    def __init__(
        self, command: Sequence[str | Path], environment: Mapping[str, str], log: IO[bytes]
    ) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            self.about = self._read(_START_S)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def figure(self, case: str, number: int) -> float:
        """Run a case and return its figure."""
        assert self._process.stdin is not None
        with self._awake():
            self._process.stdin.write(json.dumps({"case": case, "number": number}) + "\n")
            self._process.stdin.flush()
            figure = self._read(_CASE_S)["figure"]
        assert isinstance(figure, float)
        return figure

    def close(self) -> None:
        """End the process and all that it started."""
        started = self._all()
        self._signal(signal.SIGCONT)
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_END_S)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._all():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _all(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def _read(self, limit_s: float) -> dict[str, object]:
        """Return the next line of its answers.

        Raises:
            RuntimeError: It ended, or did not answer in time.
        """
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(limit_s):
                raise RuntimeError(f"no answer within {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait(_END_S)}")
        value = json.loads(line)
        assert isinstance(value, dict)
        return value

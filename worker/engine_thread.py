"""The step thread: one engine, an inbox and a way back to the event loop.

Covers taking commands between steps and sleeping when there is nothing to do. Does not cover what
a step does (`pie.worker.engine`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from pie.worker.commands import Between, Command, StepReport, Stop
from pie.worker.engine import Engine

log = logging.getLogger("pie.worker.engine_thread")

_BLOCKED_S = 0.05
"""How soon to look again when all requests wait: for a load, for room, for a deadline."""


class EngineThread:
    """Runs an engine until it is stopped.

    Args:
        engine: Belongs to this thread from `start` on.
        report: Takes each report; called on this thread, must not block.
        on_dead: Called on this thread when it ends through a bug, with the exception.
    """

    def __init__(
        self,
        engine: Engine,
        report: Callable[[StepReport], None],
        on_dead: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._report = report
        self._on_dead = on_dead
        self._ran = False
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        # A daemon: a process that is told to end does not wait for a step.
        self._thread = threading.Thread(target=self._run, name="pie-engine", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def put(self, command: Command) -> None:
        """Hand over a command; from any thread."""
        self._inbox.put(command)

    def stop(self, timeout_s: float) -> bool:
        """End after the step that runs now; say whether it has ended in time."""
        self._inbox.put(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._take():
                self._ran = self._engine.step()
                report = self._engine.take_report()
                if report is not None:
                    self._report(report)
        except BaseException as error:
            log.exception("the engine stopped")
            self._on_dead(error)

    def _take(self) -> bool:
        """Hand all commands to the engine, waiting for one if there is nothing to run.

        Returns whether to go on.
        """
        command = self._next(wait_s=self._wait_s())
        while command is not None:
            if isinstance(command, Stop):
                return False
            if isinstance(command, Between):
                command.work()
            else:
                self._engine.handle(command)
            command = self._next(wait_s=0)
        return True

    def _wait_s(self) -> float | None:
        if self._engine.is_idle:
            return self._engine.rest_s
        return 0 if self._ran else _BLOCKED_S

    def _next(self, *, wait_s: float | None) -> Command | None:
        try:
            return self._inbox.get(timeout=wait_s) if wait_s != 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None

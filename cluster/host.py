"""A service on an event loop of its own, in a thread.

Ray answers an actor's calls on its own threads; the service must never wait for them, nor they
for it. Covers starting, watching and stopping a service from another thread. Does not cover what
the service is (`pie.cluster.actors`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import uvloop

log = logging.getLogger("pie.cluster.host")
_T = TypeVar("_T")


class Phase(enum.StrEnum):
    """How far a service is."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class State:
    """A service as its starter sees it."""

    phase: Phase
    detail: str = ""
    """What it does now while it starts; its address when ready; why it failed."""
    expected: bool = True
    """Whether a failure is one that a person can mend, said in `detail`; else it is a bug."""


class Service(Protocol):
    """What a host runs."""

    async def drain(self, timeout_s: float) -> object:
        """Refuse new work and return when the running work is done or time is up."""

    async def close(self) -> None:
        """Stop at once."""


ServiceT = TypeVar("ServiceT", bound=Service)
Progress = Callable[[str], None]


class Host:
    """Runs one service in a thread.

    Args:
        name: For the thread and the log.
        start: Builds and starts the service; it returns the service and its address.
        expected: Errors of `start` whose message is meant for a person.
        passing: Those of them that may be over at another start.
        settle: Called once it has started, before anybody waits for it.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Progress], Awaitable[tuple[Service, str]]],
        *,
        expected: tuple[type[Exception], ...] = (),
        passing: tuple[type[Exception], ...] = (),
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._settle = settle
        self._start = start
        self._expected = expected
        self._passing = passing
        self._state = State(Phase.STARTING)
        self._service: Service | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"pie-{name}", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """How far the service is; read from any thread."""
        return self._state

    @property
    def service(self) -> Service | None:
        """The running service; None before it is ready and after it closed."""
        return self._service

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Run a coroutine on the service's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self, drain_s: float) -> None:
        """Drain for at most `drain_s`, close, and end the thread."""
        service = self._service
        if self._thread.is_alive() and service is not None:
            try:
                self.call(self._stop(service, drain_s)).result(drain_s + 15.0)
            except TimeoutError:
                log.exception("%s did not stop in time", self._name)
        self._state = State(Phase.CLOSED)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    async def _stop(self, service: Service, drain_s: float) -> None:
        self._service = None
        if drain_s > 0:
            await service.drain(drain_s)
        await service.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(self._begin())
        self._loop.run_forever()
        task.cancel()

    async def _begin(self) -> None:
        try:
            self._service, address = await self._start(self._progress)
        except self._expected as error:
            is_expected = not isinstance(error, self._passing)
            self._state = State(Phase.FAILED, str(error), expected=is_expected)
        except GeneratorExit:  # The loop is gone.
            raise
        # What a user's module may raise would end the loop and leave the state as it is for ever.
        except BaseException as error:
            log.exception("%s failed to start", self._name)
            self._state = State(Phase.FAILED, f"{type(error).__name__}: {error}", expected=False)
        else:
            self._settle()
            self._state = State(Phase.READY, address)

    def _progress(self, detail: str) -> None:
        if self._state.phase is Phase.STARTING:
            self._state = State(Phase.STARTING, detail)

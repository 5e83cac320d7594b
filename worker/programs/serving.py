"""Programs that routers ask a worker to run.

Covers starting them, carrying what they say to the router that asked and its client's messages back, and ending
those of a router that is gone. Does not cover running them (`pie.worker.programs.host`) or the wire
(`pie.worker.service`). For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from pie.wire.errors import RefusedError, WireError
from pie.wire.messages import RefusalCode
from pie.wire.peer import Peer
from pie.wire.program_runs import (
    ProgramEnd,
    ProgramEvent,
    ProgramEventKind,
    ProgramEvents,
    ProgramTold,
    StartProgram,
    TellProgram,
)
from pie.worker.programs.host import (
    ProgramHost,
    ProgramToRun,
    RunningProgram,
    TooManyPrograms,
)

log = logging.getLogger("pie.worker.programs.serving")

_ALIVE_S = 10.0
"""How often a router is told that a program which says nothing still runs."""
_RETRY_AFTER_S = 2.0
_MOST_SOURCE_BYTES = 1 << 20
_MOST_EVENTS = 1 << 14
_MOST_EVENTS_CHARS = 1 << 18
"""Of one message to the router, beyond one event, which may have 4 MiB: it takes messages of 8."""


class _Run:
    """One program, and what it says on its way to its router.

    What waits there is bounded by what a program may say and print.
    """

    def __init__(self, peer: Peer, request_id: str) -> None:
        self._peer = peer
        self._request_id = request_id
        self._events: list[ProgramEvent] = []
        self._wake = asyncio.Event()
        self.running: RunningProgram | None = None

    def said(self, text: str) -> None:
        """Take a message for the client."""
        self._put(ProgramEvent(ProgramEventKind.SAID, text))

    def printed(self, text: str) -> None:
        """Take what it printed."""
        if text:
            self._put(ProgramEvent(ProgramEventKind.PRINTED, text))

    async def carry(self, running: RunningProgram) -> None:
        """Tell the router all that comes, up to the end; where it takes nothing, end the program."""
        running.ended.add_done_callback(lambda _: self._wake.set())
        try:
            await self._peer.send(ProgramEvents(self._request_id))
            while not await self._send():
                pass
        except WireError:
            log.info("nobody takes what program %s says: it is ended", self._request_id)
        finally:
            running.cancel()

    def _parted(self) -> tuple[list[ProgramEvent], list[ProgramEvent]]:
        """Return what goes into one message, and what is left."""
        chars = 0
        for count, event in enumerate(self._events):
            chars += len(event.text)
            if count == _MOST_EVENTS or (count and chars > _MOST_EVENTS_CHARS):
                return self._events[:count], self._events[count:]
        return self._events, []

    def _put(self, event: ProgramEvent) -> None:
        self._events.append(event)
        self._wake.set()

    async def _send(self) -> bool:
        """Tell the router what there is, or that nothing is; return whether that was the end."""
        try:
            async with asyncio.timeout(_ALIVE_S):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        assert self.running is not None
        events, self._events = self._parted()
        end = None
        if self.running.ended.done() and events:
            self._wake.set()  # for the end, which may be as large by itself
        elif self._events:
            self._wake.set()
        elif self.running.ended.done():
            ended = self.running.ended.result()
            end = ProgramEnd(ended.reason.value, ended.result, ended.error)
        await self._peer.send(ProgramEvents(self._request_id, tuple(events), end))
        return end is not None


class ProgramService:
    """Runs programs for routers.

    Args:
        host: Runs them.
    """

    def __init__(self, host: ProgramHost) -> None:
        self._host = host
        self._runs: dict[tuple[bytes, str], _Run] = {}
        self._carrying: set[asyncio.Task[None]] = set()

    async def start(self, peer: Peer, message: StartProgram, frames: Sequence[memoryview]) -> None:
        """Start a program.

        Raises:
            RefusedError: It cannot be run here, or not now.
        """
        key = (peer.id, message.request_id)
        if not message.request_id or key in self._runs:
            raise RefusedError(RefusalCode.BAD_MESSAGE, "the program's id is missing, or was used")
        run = self._runs[key] = _Run(peer, message.request_id)
        try:
            run.running = await self._started(run, message, bytes(frames[0]))
        except BaseException:
            del self._runs[key]
            raise
        if peer.is_gone:
            run.running.cancel()
        task = asyncio.get_running_loop().create_task(self._carry(key, run, run.running))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def tell(self, peer: Peer, message: TellProgram) -> None:
        """Hand a client's message to its program.

        Raises:
            RefusedError: It has ended, or too many messages wait for it.
        """
        run = self._runs.get((peer.id, message.program))
        if run is None or run.running is None:
            raise RefusedError(RefusalCode.BAD_MESSAGE, "the program has ended")
        if not run.running.tell(message.text):
            raise RefusedError(
                RefusalCode.OVERLOADED, "too many messages wait for the program", _RETRY_AFTER_S
            )
        await peer.send(ProgramTold(message.request_id))

    def cancel(self, owner: bytes, request_id: str) -> None:
        """End a program; nothing where there is none of that id."""
        run = self._runs.get((owner, request_id))
        if run is not None and run.running is not None:
            run.running.cancel()

    def cancel_all(self, owner: bytes) -> None:
        """End all programs of a router."""
        for one, request_id in list(self._runs):
            if one == owner:
                self.cancel(owner, request_id)

    async def ended(self) -> None:
        """Wait until none runs, and their ends are told."""
        while self._carrying:
            await asyncio.wait(self._carrying)

    async def close(self) -> None:
        """End all programs and wait until they are gone."""
        await self._host.close()
        tasks = list(self._carrying)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _started(self, run: _Run, message: StartProgram, data: bytes) -> RunningProgram:
        if len(data) > _MOST_SOURCE_BYTES:
            raise _bad(f"a program has at most {_MOST_SOURCE_BYTES} bytes")
        try:
            program = ProgramToRun(
                message.name,
                data.decode(),
                message.arguments,
                message.entry,
                message.salt,
                message.tenant_tag,
                message.session_tag,
            )
            return await self._host.start(program, on_said=run.said, on_output=run.printed)
        except UnicodeDecodeError as error:
            raise _bad("the program is not text in UTF-8") from error
        except TooManyPrograms as error:
            raise RefusedError(RefusalCode.OVERLOADED, str(error), _RETRY_AFTER_S) from error
        except OSError as error:
            log.exception("a program's process could not be started")
            text = f"no process could be started: {error.strerror}"
            raise RefusedError(RefusalCode.OVERLOADED, text, _RETRY_AFTER_S) from error

    async def _carry(self, key: tuple[bytes, str], run: _Run, running: RunningProgram) -> None:
        try:
            await run.carry(running)
        finally:
            del self._runs[key]


def _bad(text: str) -> RefusedError:
    return RefusedError(RefusalCode.BAD_MESSAGE, text)

"""The connection to one worker.

Covers connecting, and handing deltas to the attempts that they belong to. Does not cover what is
known of its load (`pie.router.books`), which workers there are (`pie.router.workers`) or which one is
chosen (`pie.router.choice`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing

from pie.index.contract import PlaceRecord
from pie.router.asking import ask_status
from pie.router.books import Running, WorkerBooks
from pie.wire import Buffer, WireClient, WireError, WireSettings, WireTimeout
from pie.wire.address import check_address, check_keys
from pie.wire.ids import new_request_id
from pie.wire.messages import (
    Cancel,
    Generate,
    Message,
    Refused,
    StatusReport,
    StepTokens,
    TokenDelta,
)
from pie.wire.place_orders import (
    BringNear,
    Drained,
    DrainNode,
    LetGoOf,
    PagesMoved,
    StoreInPool,
    TakeAgain,
    TakesAgain,
)
from pie.wire.program_runs import ProgramEvents, StartProgram, TellProgram
from pie.wire.settings import WORKER_LIMITS

log = logging.getLogger("pie.router.link")

_RECONNECT_S = 0.5
_DRAINED_S = 20.0
"""How much longer than it was given a worker may take to say that it is drained."""
_PROGRAM_SILENT_S = 40.0
"""A worker says every ten seconds that a program still runs."""
_MOST_PROGRAM_EVENTS = 1 << 40


class WorkerLink(WorkerBooks):
    """The connection to one start of one worker, and the books about it.

    Args:
        record: The worker's record; a new start of it gets a new link.
        settings: Limits of the wire.
        secret: 32 bytes that all of the cluster share, for workers beyond this host.
    """

    def __init__(
        self,
        record: PlaceRecord,
        settings: WireSettings | None = None,
        *,
        secret: bytes | None = None,
    ) -> None:
        super().__init__(record)
        self.retired = False
        """Whether its record is gone: what runs goes on, nothing new comes."""
        self._settings = settings
        self._secret = secret
        self._client: WireClient | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether it takes requests now."""
        return self.connected and not self.retired and not self.record.draining

    @property
    def connected(self) -> bool:
        """Whether there is a connection to this start of it."""
        client = self._client
        return client is not None and client.is_up and client.epoch == self.record.epoch

    def start(self) -> None:
        """Begin to connect; `usable` says when that is done.

        Raises:
            AddressError: The record's address is none, or needs a secret.
        """
        check_address(self.record.address)
        check_keys(self.record.address, self._secret)
        self._spawn(self._connect())

    async def close(self) -> None:
        """Disconnect; attempts that run learn that the worker is gone."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        self._all_gone()

    async def begin(
        self, message: Generate, frame: Buffer, running: Running, *, timeout_s: float
    ) -> None:
        """Send a request; from now on its sink is told what comes of it.

        Raises:
            WireError: It could not be sent; the sink is told nothing.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        self.sent(message.request_id, running)
        try:
            await client.send(message, (frame,), timeout_s=timeout_s)
        except BaseException:
            self.ended(message.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Stop listening to an attempt, and tell the worker to give it up where it still runs."""
        if self.ended(request_id) is not None and not self._closed:
            self._spawn(self._send_cancel(request_id))

    async def ask_status(self, timeout_s: float) -> StatusReport | None:
        """Return what the worker says of itself; None where it says nothing in time."""
        client = self._client
        return None if client is None else await ask_status(client, self.record, timeout_s)

    async def order(
        self, message: StoreInPool | BringNear | LetGoOf, *, timeout_s: float
    ) -> PagesMoved:
        """Give the worker an order about pages, and return what became of it.

        Raises:
            RefusedError: It does not carry it out.
            WireError: It is gone, or does not answer in time.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        answer, _ = await client.request(message, timeout_s=timeout_s)
        if not isinstance(answer, PagesMoved):
            raise WireError(f"it answered with {type(answer).__name__}")
        return answer

    async def drain(self, timeout_s: float) -> Drained:
        """Let the worker take no more requests, and return which pages it handed on.

        Raises:
            RefusedError: It was told meanwhile to take requests again.
            WireError: It is gone, or does not answer in time.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        ask = DrainNode(new_request_id(), self.record.epoch, timeout_s)
        answer, _ = await client.request(ask, timeout_s=timeout_s + _DRAINED_S)
        if not isinstance(answer, Drained):
            raise WireError(f"it answered with {type(answer).__name__}")
        return answer

    async def take_again(self, *, timeout_s: float) -> None:
        """Let the worker take requests again that was drained, or is.

        Raises:
            RefusedError: It does not: it is stopping.
            WireError: It is gone, or does not answer in time.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        ask = TakeAgain(new_request_id(), self.record.epoch)
        answer, _ = await client.request(ask, timeout_s=timeout_s)
        if not isinstance(answer, TakesAgain):
            raise WireError(f"it answered with {type(answer).__name__}")

    async def run_program(
        self, message: StartProgram, source: bytes
    ) -> AsyncGenerator[ProgramEvents, None]:
        """Run a program there and yield what it says, up to its end; leaving early ends it.

        Raises:
            RefusedError: The worker does not run it.
            WireError: The worker is gone, or says nothing for long.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        self.programs += 1
        try:
            stream = client.stream(
                message, (source,), timeout_s=_PROGRAM_SILENT_S, count=_MOST_PROGRAM_EVENTS
            )
            async with aclosing(stream):
                async for answer, _ in stream:
                    assert isinstance(answer, ProgramEvents)
                    yield answer
                    if answer.end is not None:
                        return
        finally:
            self.programs -= 1

    async def tell_program(self, message: TellProgram, *, timeout_s: float) -> None:
        """Hand a program a message of its client.

        Raises:
            RefusedError: It has ended, or too many wait for it.
            WireError: The worker is gone, or does not answer in time.
        """
        client = self._client
        if client is None:
            raise WireTimeout("not connected")
        await client.request(message, timeout_s=timeout_s)

    def _on_message(self, message: Message, frames: Sequence[memoryview]) -> None:
        del frames
        if isinstance(message, StepTokens):
            self.told_load(message.load)
            for delta in message.deltas:
                self._on_delta(delta)
        elif isinstance(message, Refused):
            running = self.ended(message.request_id)
            if running is not None:
                running.sink.on_refused(message)

    def _on_delta(self, delta: TokenDelta) -> None:
        running = self.told(delta)
        if running is not None:
            running.sink.on_delta(delta)

    def _all_gone(self) -> None:
        for request_id in (*self._waiting, *self._decoding):
            running = self.ended(request_id)
            if running is not None:
                running.sink.on_gone()
        self.load = None

    async def _connect(self) -> None:
        """Connect, however long that takes; the client keeps the connection from then on."""
        while not self._closed:
            client = WireClient(
                self.record.address,
                on_message=self._on_message,
                on_gone=self._all_gone,
                settings=self._settings,
                secret=self._secret,
                server_limits=WORKER_LIMITS,
            )
            try:
                await client.start()
            except WireError as error:
                log.debug("worker %s does not answer: %s", self.record.place, error)
                await client.close()
                await asyncio.sleep(_RECONNECT_S)
            except asyncio.CancelledError:
                await client.close()
                raise
            else:
                self._client = client
                return

    async def _send_cancel(self, request_id: str) -> None:
        client = self._client
        if client is None:
            return
        try:
            await client.send(Cancel(request_id), timeout_s=5.0)
        except WireError:
            # A worker that is gone has nothing left to cancel.
            log.debug("worker %s was not told to cancel %s", self.record.place, request_id)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

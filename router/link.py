"""One worker as a router sees it: the connection, what runs there, and how fast it is.

Covers connecting, handing deltas to the attempts that they belong to, bookkeeping of tokens ahead
and prefixes in the making, and rates learned from answers. Does not cover which workers there are
(`pie.router.workers`) or which one is chosen (`pie.router.choice`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from pie.index.contract import PlaceRecord
from pie.page.key import PageKey
from pie.router.asking import ask_status
from pie.router.rates import Rates
from pie.wire import Buffer, WireClient, WireError, WireSettings, WireTimeout
from pie.wire.address import check_address
from pie.wire.messages import (
    Cancel,
    Generate,
    Load,
    Message,
    Refused,
    StatusReport,
    StepTokens,
    TokenDelta,
)

log = logging.getLogger("pie.router.link")

_RECONNECT_S = 0.5
_LOAD_FRESH_S = 3.0
"""A load report says nothing of other routers' requests after so long without a newer one."""
_DECODE_STEP_MS = 50.0


class AttemptSink(Protocol):
    """Takes what a worker says about one attempt. Nothing here may block."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens; the last delta has a finish reason."""

    def on_refused(self, refused: Refused) -> None:
        """Learn that the worker does not carry it out."""

    def on_gone(self) -> None:
        """Learn that the worker is gone."""


@dataclass(eq=False, slots=True)
class Running:
    """What an attempt counts for at its worker."""

    sink: AttemptSink
    keys: Sequence[PageKey]
    """The prompt's pages: held there, or in the making."""
    new_tokens: int
    """Prompt tokens that the worker was expected to compute."""
    prompt_tokens: int
    started: bool = False


class WorkerLink:
    """The connection to one start of one worker.

    Args:
        record: The worker's record; a new start of it gets a new link.
        settings: Limits of the wire.
    """

    def __init__(self, record: PlaceRecord, settings: WireSettings | None = None) -> None:
        self.record = record
        self.load: Load | None = None
        self.rates = Rates()
        self.inflight_keys: Counter[PageKey] = Counter()
        self.retired = False
        """Whether its record is gone: what runs goes on, nothing new comes."""
        self._settings = settings
        self._client: WireClient | None = None
        self._load_at_s = 0.0
        self._queued_tokens = 0
        self._decoding = 0
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def usable(self) -> bool:
        """Whether it takes requests now."""
        client = self._client
        return (
            client is not None
            and not self.retired
            and client.is_up
            and client.epoch == self.record.epoch
        )

    @property
    def running(self) -> int:
        """Attempts of this router that run there."""
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there, whoever sent them."""
        reported = 0
        if self.load is not None and time.monotonic() - self._load_at_s < _LOAD_FRESH_S:
            reported = self.load.waiting_tokens
        return max(self._queued_tokens, reported)

    @property
    def decoding(self) -> int:
        """Sequences in decode there, whoever sent them."""
        reported = 0
        if self.load is not None and time.monotonic() - self._load_at_s < _LOAD_FRESH_S:
            reported = self.load.running
        return max(self._decoding, reported)

    @property
    def decode_step_ms(self) -> float:
        """Reported, else a guess."""
        return self.load.step_ms if self.load and self.load.step_ms > 0 else _DECODE_STEP_MS

    def start(self) -> None:
        """Begin to connect; `usable` says when that is done.

        Raises:
            AddressError: The record's address is none.
        """
        check_address(self.record.address)
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
        self._running[message.request_id] = running
        self._queued_tokens += running.new_tokens
        self.inflight_keys.update(running.keys)
        try:
            await client.send(message, (frame,), timeout_s=timeout_s)
        except BaseException:
            self._end(message.request_id)
            raise

    def cancel(self, request_id: str) -> None:
        """Stop listening to an attempt, and tell the worker to give it up where it still runs."""
        if self._end(request_id) is not None and not self._closed:
            self._spawn(self._send_cancel(request_id))

    async def ask_status(self, timeout_s: float) -> StatusReport | None:
        """Return what the worker says of itself; None where it says nothing in time."""
        client = self._client
        return None if client is None else await ask_status(client, self.record, timeout_s)

    def _end(self, request_id: str) -> Running | None:
        """Take an attempt out of the books."""
        running = self._running.pop(request_id, None)
        if running is None:
            return None
        if running.started:
            self._decoding -= 1
        else:
            self._queued_tokens -= running.new_tokens
        keys = self.inflight_keys
        for key in running.keys:
            if keys[key] > 1:
                keys[key] -= 1
            else:
                del keys[key]
        return running

    def _on_message(self, message: Message, frames: Sequence[memoryview]) -> None:
        del frames
        if isinstance(message, StepTokens):
            self.load = message.load
            self._load_at_s = time.monotonic()
            for delta in message.deltas:
                self._on_delta(delta)
        elif isinstance(message, Refused):
            running = self._end(message.request_id)
            if running is not None:
                running.sink.on_refused(message)

    def _on_delta(self, delta: TokenDelta) -> None:
        running = self._running.get(delta.request_id)
        if running is None:
            return
        if delta.started is not None and not running.started:
            running.started = True
            self._queued_tokens -= running.new_tokens
            self._decoding += 1
            self.rates.learn(running.prompt_tokens, delta.started)
        if delta.finish_reason is not None:
            self._end(delta.request_id)
        running.sink.on_delta(delta)

    def _all_gone(self) -> None:
        for request_id in list(self._running):
            running = self._end(request_id)
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

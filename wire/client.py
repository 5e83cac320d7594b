"""The connecting end of the wire.

Covers requests and their answers, streams, messages that come unasked, and credit for them. Does
not cover the connection itself (`pie.wire.link`) or finding servers (`pie.index`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence

from pie.page.events import Epoch
from pie.wire import codec
from pie.wire.address import check_address, check_keys
from pie.wire.answers import Answer, Answers
from pie.wire.counters import WireCounters
from pie.wire.errors import MessageTooLarge, PeerGone, RefusedError, WireTimeout
from pie.wire.frames import Buffer, Loan
from pie.wire.link import Link
from pie.wire.messages import (
    Cancel,
    Credit,
    GetPages,
    LookupResult,
    MemoryShared,
    Message,
    PageData,
    Pong,
    PutResult,
    RefusalCode,
    Refused,
    StatusReport,
    StepTokens,
)
from pie.wire.place_orders import Drained, PagesMoved, TakesAgain
from pie.wire.program_runs import ProgramEvents, ProgramTold
from pie.wire.settings import WireSettings
from pie.wire.window import Window

_log = logging.getLogger("pie.wire")

OnMessage = Callable[[Message, Sequence[memoryview]], None]
"""Takes a message that answers no request. Must not block."""

_CREDIT_RETRY_S = 0.01
_CREDIT_WAIT_S = 0.02
"""Credit for a few messages waits so long for that of others: each sending takes a tenth of a
millisecond, for which an answer that has just come would wait."""
_CREDIT_SHARE = 4
"""A part of the credit that is worth a message of its own, of messages or of bytes: the sender has the
rest meanwhile."""
_ANSWERS = (
    LookupResult,
    PutResult,
    StatusReport,
    MemoryShared,
    Drained,
    PagesMoved,
    TakesAgain,
    Pong,
    ProgramEvents,
    ProgramTold,
)


class WireClient:
    """Talks to one server, and connects again whenever it goes and comes back.

    Use it on the event loop that started it only.
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: OnMessage | None = None,
        on_gone: Callable[[], None] | None = None,
        on_up: Callable[[Epoch], None] | None = None,
        settings: WireSettings | None = None,
        secret: bytes | None = None,
        server_limits: WireSettings | None = None,
    ) -> None:
        """Prepare a client; it connects from `start` on.

        Args:
            address: What `WireServer.start` returned.
            on_message: Takes what answers no request: `StepTokens`, which count as handled when
                it returns, and `Refused` for messages that were sent with `send`.
            on_gone: Called each time that the server goes: it ended, or its host, or it answers
                no heartbeat. Requests that wait raise `PeerGone` by themselves.
            on_up: Called with the server's epoch each time that it answers after `start` or after
                it was gone; the epoch tells a restart from a broken connection.
            settings: Limits.
            secret: 32 bytes that all of the cluster share; a `curve://` address needs them.
            server_limits: What the server takes; what is larger is not sent.

        Raises:
            AddressError: The address is malformed, is in clear beyond loopback, or has no secret.
        """
        check_address(address)
        check_keys(address, secret)
        self.counters = WireCounters()
        self._on_message = on_message
        self._on_gone = on_gone
        self._on_up = on_up
        self._settings = settings or WireSettings()
        self._server_limits = server_limits or WireSettings()
        self._pending: dict[str, Answers] = {}
        self._window = Window(self._settings.inflight_requests, self._settings.inflight_bytes)
        self._ungranted = 0
        self._ungranted_bytes = 0
        self._grant_is_due = False
        self._link = Link(
            address,
            self._settings,
            secret=secret,
            on_message=self._on_parts,
            on_up=self._went_up,
            on_gone=self._went_down,
        )

    @property
    def is_up(self) -> bool:
        """Whether the server answers."""
        return self._link.epoch is not None

    @property
    def epoch(self) -> Epoch:
        """The server's epoch, as of its last answer.

        Raises:
            PeerGone: It is not up.
        """
        if self._link.epoch is None:
            raise PeerGone("The server does not answer.")
        return self._link.epoch

    async def start(self) -> Epoch:
        """Connect and return the server's epoch.

        Raises:
            WireTimeout: No answer within `WireSettings.connect_timeout_s`. The client is closed.
        """
        self._loop = asyncio.get_running_loop()
        return await self._link.start()

    async def close(self) -> None:
        """Disconnect. Requests that wait raise `PeerGone`; `on_gone` is not called."""
        self._fail_pending("The client was closed.")
        self._window.end(PeerGone("The client was closed."))
        await self._link.close()

    async def send(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        release: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message whose answers, if any, go to `on_message`.

        Returns once it is on its way. Large frames are not copied: leave them as they are until
        `release` is called, which happens once, on the event loop, also when this call raises.

        Raises:
            MessageTooLarge: The server would not take it; nothing was sent.
            PeerGone: The server is gone.
            WireTimeout: The connection had no room in time. Nothing was sent.
        """
        loan = Loan(frames, release, asyncio.get_running_loop())
        try:
            await self._send(message, loan, timeout_s)
        finally:
            loan.close()

    async def request(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        timeout_s: float | None,
        release: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a message that has a `request_id` and return its one answer.

        Request ids must be unique among what is under way; `new_request_id` makes them. Without
        `timeout_s` the caller ends the wait, by a limit of its own.

        Raises:
            RefusedError: The server refused.
            MessageTooLarge: The server would not take it; nothing was sent.
            PeerGone: The server is gone, or goes while this waits.
            WireTimeout: No answer in time; the server was sent a `Cancel`.
        """
        loan = Loan(frames, release, asyncio.get_running_loop())
        request_id = codec.request_id_of(message)
        answers = None
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._open(request_id, loan)
                await self._send(message, loan, timeout_s)
                answer = await answers.take()
        except BaseException as error:
            if answers is not None:
                self._abandon(request_id, error)
            if isinstance(error, TimeoutError) and timeout_s is not None:
                raise WireTimeout(f"No answer within {timeout_s:g} s.") from None
            raise
        finally:
            loan.close()
            if answers is not None:
                self._finish(request_id, loan)
        self._handled([answer])
        return answer

    async def stream(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        timeout_s: float | None,
        count: int | None = None,
    ) -> AsyncGenerator[Answer, None]:
        """Send a message that has a `request_id` and yield its answers as they come.

        An answer counts as handled, and gives credit, when the next is asked for. Leaving early
        sends a `Cancel`.

        Args:
            message: The request, such as `GetPages`.
            frames: Its payload.
            timeout_s: Longest wait for each answer; None where the caller has a limit of its own.
            count: Most answers that there are; None is one for each of the message's `pages`.

        Raises:
            RefusedError: The server refused.
            MessageTooLarge: The server would not take it; nothing was sent.
            PeerGone: The server is gone, or goes while this waits.
            WireTimeout: An answer did not come in time.
        """
        if count is None:
            count = len(message.pages) if isinstance(message, GetPages) else 1
        loan = Loan(frames, None, asyncio.get_running_loop())
        request_id = codec.request_id_of(message)
        answers = None
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._open(request_id, loan)
                await self._send(message, loan, timeout_s)
            for _ in range(count):
                async with asyncio.timeout(timeout_s):
                    answer = await answers.take()
                try:
                    yield answer
                finally:
                    self._handled([answer])
        except BaseException as error:
            if answers is not None:
                self._abandon(request_id, error)
            if isinstance(error, TimeoutError) and timeout_s is not None:
                raise WireTimeout(f"No answer within {timeout_s:g} s.") from None
            raise
        finally:
            loan.close()
            if answers is not None:
                self._finish(request_id, loan)

    async def _send(self, message: Message, loan: Loan, timeout_s: float | None) -> None:
        limit_s = self._settings.send_timeout_s if timeout_s is None else timeout_s
        header = codec.encode(message)
        if (problem := codec.too_large(header, loan.frames, self._server_limits)) is not None:
            raise MessageTooLarge(problem)
        await self._link.send(header, loan, limit_s)
        self.counters.messages_out += 1
        self.counters.payload_bytes_out += loan.bytes

    async def _open(self, request_id: str, loan: Loan) -> Answers:
        """Wait until one more request may be under way; return where its answers come."""
        if not request_id:
            raise ValueError("A request needs a request_id.")
        await self._window.take(loan.bytes)
        if request_id in self._pending:
            self._window.give(loan.bytes)
            raise ValueError(f"A request {request_id!r} is under way already.")
        answers = self._pending[request_id] = Answers()
        return answers

    def _abandon(self, request_id: str, error: BaseException) -> None:
        """Tell the server that nobody waits for a request's answers any more."""
        if not isinstance(error, RefusedError | PeerGone | MessageTooLarge) and self.is_up:
            self._link.push(codec.encode(Cancel(request_id)))

    def _finish(self, request_id: str, loan: Loan) -> None:
        self._handled(self._pending.pop(request_id).drop())
        self._window.give(loan.bytes)

    def _on_parts(self, message: Message, frames: list[memoryview]) -> None:
        """Take in one message that is no heartbeat."""
        self.counters.messages_in += 1
        self.counters.payload_bytes_in += sum(frame.nbytes for frame in frames)
        request_id = codec.request_id_of(message)
        answers = self._pending.get(request_id)
        if answers is not None:
            if isinstance(message, Refused):
                answers.fail(RefusedError(message.code, message.message, message.retry_after_s))
            else:
                answers.put((message, frames))
        elif isinstance(message, StepTokens):
            if message.epoch == self._link.epoch:
                self._pass_on(message, frames)
            else:
                self.counters.stale_epochs += 1
            self._handled([(message, frames)])
        elif isinstance(message, PageData):
            self.counters.late_answers += 1
            self._handled([(message, frames)])
        elif isinstance(message, _ANSWERS):
            self.counters.late_answers += 1
        elif isinstance(message, Refused) and not request_id:
            if message.code is RefusalCode.STALE_EPOCH:
                self._link.reconnect(message.message)
            else:
                _log.warning("%s refused a message: %s", self._link, message.message)
        else:
            self._pass_on(message, frames)

    def _pass_on(self, message: Message, frames: list[memoryview]) -> None:
        if self._on_message is None:
            return
        try:
            self._on_message(message, frames)
        except Exception:  # noqa: BLE001 - a failing receiver must not stop other messages
            self.counters.failures += 1
            _log.exception("Taking a %s failed.", type(message).__name__)

    def _handled(self, answers: Iterable[Answer]) -> None:
        """Give credit for those of them that cost the sender some."""
        costly = [
            frames for message, frames in answers if isinstance(message, StepTokens | PageData)
        ]
        if costly:
            self._credit(len(costly), sum(frame.nbytes for frames in costly for frame in frames))

    def _credit(self, messages: int, size_bytes: int = 0) -> None:
        """Give credit, together with that for what else comes in a moment."""
        self._ungranted += messages
        self._ungranted_bytes += size_bytes
        settings = self._settings
        if (
            self._ungranted * _CREDIT_SHARE >= settings.credit_messages
            or self._ungranted_bytes * _CREDIT_SHARE >= settings.credit_bytes
        ):
            self._send_credit()
        elif not self._grant_is_due:
            self._grant_is_due = True
            self._loop.call_later(_CREDIT_WAIT_S, self._grant)

    def _grant(self) -> None:
        self._grant_is_due = False
        self._send_credit()

    def _send_credit(self) -> None:
        """Send the credit that is due; try again later where there is no room for it."""
        if not self.is_up or not self._ungranted:
            return
        if self._link.push(codec.encode(Credit(self._ungranted))):
            self._ungranted = self._ungranted_bytes = 0
        elif not self._grant_is_due:
            self._grant_is_due = True
            self._loop.call_later(_CREDIT_RETRY_S, self._grant)

    def _went_up(self, epoch: Epoch) -> None:
        # The server counts credit anew for every connection.
        self._ungranted = self._ungranted_bytes = 0
        self._call(lambda: self._on_up(epoch) if self._on_up is not None else None)

    def _went_down(self, reason: str) -> None:
        self.counters.gone += 1
        self._fail_pending(reason)
        self._call(lambda: self._on_gone() if self._on_gone is not None else None)

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # noqa: BLE001 - a failing listener must not stop the link
            self.counters.failures += 1
            _log.exception("A callback failed.")

    def _fail_pending(self, reason: str) -> None:
        for answers in self._pending.values():
            answers.fail(PeerGone(reason))

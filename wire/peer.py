"""One connected client, seen from the server.

Covers sending to it, its credit and the moment it goes. Does not cover how its messages come in
(`pie.wire.server`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pie.wire import codec
from pie.wire.counters import WireCounters
from pie.wire.errors import PeerGone, WireTimeout
from pie.wire.frames import Buffer, Loan
from pie.wire.messages import Message, PageData, RefusalCode, Refused, StepTokens
from pie.wire.port import Outbox, Port
from pie.wire.settings import WireSettings
from pie.wire.window import CreditWindow


class Peer:
    """One connected client. Use it on the server's event loop only.

    A client that reconnects is another peer: what was under way for the old one is lost.
    """

    def __init__(
        self, peer_id: bytes, port: Port, settings: WireSettings, counters: WireCounters
    ) -> None:
        self.id = peer_id
        """Unique among the peers of one server."""
        self.heard_s = 0.0
        """When it last said anything, by how long the server had run (`Awake`). The server's to write."""
        self._settings = settings
        self._counters = counters
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox(port, (peer_id,))
        # Works beyond `end`, unlike the other.
        self._raw = Outbox(port, (peer_id,))
        self._credits = CreditWindow(settings.credit_messages, settings.credit_bytes)
        self._on_gone: list[Callable[[], None]] = []
        self._is_gone = False

    def __repr__(self) -> str:
        return f"<Peer {self.id.hex()}{' gone' if self._is_gone else ''}>"

    @property
    def is_gone(self) -> bool:
        """Whether the client is known to be gone."""
        return self._is_gone

    @property
    def has_credit(self) -> bool:
        """Whether a `StepTokens` or `PageData` could be sent now without waiting."""
        return not self._is_gone and self._credits.has_room

    async def send(
        self,
        message: Message,
        frames: Sequence[Buffer] = (),
        *,
        release: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Send a message; return once it is on its way.

        `StepTokens` and `PageData` wait for credit, in order among themselves; all else may
        overtake them. Large frames are not copied: leave them as they are until `release` is
        called.

        Args:
            message: The header.
            frames: The payload.
            release: Called once, on the event loop, when no frame is read any more; also when
                this call raises.
            timeout_s: Longest wait for credit or room; None is `WireSettings.send_timeout_s`.

        Raises:
            PeerGone: The client is gone, or goes while this waits.
            WireTimeout: No credit or room came in time. Nothing was sent.
        """
        limit_s = self._settings.send_timeout_s if timeout_s is None else timeout_s
        loan = Loan(frames, release, self._loop)
        try:
            header = codec.encode(message)
            if isinstance(message, StepTokens | PageData):
                await self._send_on_credit(header, loan, limit_s)
            else:
                await self._outbox.send(header, loan, limit_s)
        except PeerGone as error:
            self.end(str(error))
            raise
        finally:
            loan.close()
        self._counters.messages_out += 1
        self._counters.payload_bytes_out += loan.bytes

    def push(self, message: Message) -> bool:
        """Send a small message at once, past all others; return whether it went.

        It does not where the client is gone or takes nothing.
        """
        try:
            went = self._outbox.push(codec.encode(message))
        except PeerGone as error:
            self.end(str(error))
            return False
        self._counters.messages_out += went
        return went

    def probe(self, message: Message) -> bool:
        """Send a heartbeat past all limits of this peer; return whether it is connected."""
        try:
            self._raw.push(codec.encode(message))
        except PeerGone:
            return False
        return True

    def tell_forgotten(self) -> None:
        """Tell a client that is taken for gone, but is there, to connect again."""
        text = "The client was silent for too long and has to connect again."
        self.probe(Refused("", RefusalCode.STALE_EPOCH, text))

    def credit(self, messages: int) -> None:
        """Take in that the client has handled so many credited messages."""
        self._credits.credit(messages)

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once on the event loop when the client goes; soon, if it has gone."""
        if self._is_gone:
            self._loop.call_soon(callback)
        else:
            self._on_gone.append(callback)

    def end(self, reason: str) -> None:
        """Take the client for gone: every send, now and later, raises `PeerGone`."""
        if self._is_gone:
            return
        self._is_gone = True
        self._counters.gone += 1
        error = PeerGone(reason)
        self._outbox.end(error)
        self._credits.end(error)
        for callback in self._on_gone:
            self._loop.call_soon(callback)
        self._on_gone.clear()

    async def _send_on_credit(self, header: bytes, loan: Loan, limit_s: float) -> None:
        size_bytes = len(header) + loan.bytes
        if self._credits.has_room_for(size_bytes):
            await self._credits.take(size_bytes)
        else:
            try:
                async with asyncio.timeout(limit_s):
                    await self._credits.take(size_bytes)
            except TimeoutError:
                raise WireTimeout(f"{self!r} gave no credit for {limit_s:g} s.") from None
        try:
            await self._outbox.send(header, loan, limit_s)
        except BaseException:
            self._credits.give(size_bytes)
            raise
        self._credits.sent(size_bytes)

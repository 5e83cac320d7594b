"""One zmq socket on an event loop.

Covers taking in whole messages as they come and pushing them out without blocking. Does not
cover what they mean. It uses zmq's file descriptor itself instead of `zmq.asyncio`: sending needs
no task, and a round trip takes about half as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Callable, Sequence
from typing import cast

import zmq

from pie.wire.errors import PeerGone, WireTimeout
from pie.wire.frames import COPY_BELOW_BYTES, Loan

_log = logging.getLogger("pie.wire")

_NOW = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENOTSOCK)

# Other callbacks of the loop get their turn after so many messages.
_MESSAGES_AT_ONCE = 64

_FIRST_RETRY_S = 0.001
_LAST_RETRY_S = 0.02

# zmq drops what is left of a closed socket on a thread of its own.
_LOANS_RETURN_S = 1.0


class Port:
    """A socket that calls `on_parts` with the frames of each message that comes."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_parts: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self.socket = socket
        socket.copy_threshold = COPY_BELOW_BYTES
        self._ask = cast(Callable[[int], int], socket.get)
        self._on_parts = on_parts
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_is_due = False
        self._closed = False
        self._loans: set[Loan] = set()
        self._loans_are_back = asyncio.Event()
        self._loop.add_reader(self._fd, self.drain)
        self.kick()

    def push(self, head: Sequence[bytes], loan: Loan | None = None) -> None:
        """Send a message now.

        Raises:
            zmq.Again: There is no room. Nothing was sent.
            PeerGone: There is no such peer. Nothing was sent.
        """
        if self._closed:
            raise PeerGone("This end of the connection is closed.")
        frames = loan.frames if loan is not None else ()
        last = len(head) - 1
        if loan is not None and loan.is_awaited:
            self._loans.add(loan)
            loan.on_end(self._take_back)
        try:
            for i, part in enumerate(head):
                self.socket.send(part, _MORE if frames or i < last else _NOW)
            for i, frame in enumerate(frames, start=1):
                assert loan is not None
                flags = _MORE if i < len(frames) else _NOW
                self.socket.send(loan.lend(frame), flags, copy=False)
        except zmq.Again:
            self.kick()
            raise
        except zmq.ZMQError as error:
            if error.errno in _UNREACHABLE:
                raise PeerGone("The other side is gone.") from None
            raise
        self.kick()

    def kick(self) -> None:
        """See to it that messages are taken in soon.

        zmq's descriptor tells of changes, not of messages, and a send may use up the change that
        a new message made: so every send is followed by a look.
        """
        if not self._drain_is_due:
            self._drain_is_due = True
            self._loop.call_soon(self.drain)

    def drain(self) -> None:
        """Take in messages until there are none, or it is others' turn."""
        self._drain_is_due = False
        receive = self.socket.recv
        ask = self._ask
        for _ in range(_MESSAGES_AT_ONCE):
            # Asking costs a third of an exception, which every second receive would raise.
            if self._closed or not ask(_EVENTS) & _POLLIN:
                return
            try:
                frame = receive(_NOW, False)
                parts = [frame]
                while frame.more:
                    frame = receive(_NOW, False)
                    parts.append(frame)
            except zmq.Again:
                return
            try:
                self._on_parts(parts)
            except Exception:  # noqa: BLE001 - one message must not take the port down
                _log.exception("A message could not be taken in.")
        self.kick()

    def settle(self) -> None:
        """Let zmq take note of connections that have closed."""
        if not self._closed:
            self.socket.getsockopt(zmq.EVENTS)
            self.kick()

    async def close(self, linger_s: float = 0.0) -> None:
        """Close the socket; what it still has to send may take `linger_s` more.

        Returns when all lent frames are back.
        """
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        self.socket.close(linger=round(linger_s * 1000))
        if self._loans:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_s + _LOANS_RETURN_S):
                    await self._loans_are_back.wait()

    def _take_back(self, loan: Loan) -> None:
        self._loans.discard(loan)
        if self._closed and not self._loans:
            self._loans_are_back.set()


class Outbox:
    """Sends to one other side through a port, in order, waiting where there is no room."""

    def __init__(self, port: Port, prefix: Sequence[bytes]) -> None:
        self._port = port
        self._prefix = tuple(prefix)
        self._turn = asyncio.Lock()
        self._end: PeerGone | None = None

    def push(self, header: bytes) -> bool:
        """Send a header now, past those that wait; return False where there is no room.

        Raises:
            PeerGone: The other side is gone.
        """
        if self._end is not None:
            raise self._end
        try:
            self._port.push((*self._prefix, header))
        except zmq.Again:
            return False
        return True

    async def send(self, header: bytes, loan: Loan, timeout_s: float) -> None:
        """Send a message, after those that wait.

        Raises:
            PeerGone: The other side is gone, or goes while this waits.
            WireTimeout: There was no room in time. Nothing was sent.
        """
        if self._end is not None:
            raise self._end
        head = (*self._prefix, header)
        if not self._turn.locked():
            try:
                self._port.push(head, loan)
            except zmq.Again:
                pass
            else:
                return
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                await self._push_when_possible(head, loan)
        except TimeoutError:
            raise WireTimeout(f"The other side took nothing for {timeout_s:g} s.") from None

    def end(self, error: PeerGone) -> None:
        """Let every send, now and later, raise `error`."""
        self._end = error

    async def _push_when_possible(self, head: Sequence[bytes], loan: Loan) -> None:
        """Push again and again: a ROUTER tells that some peer has room, but not which."""
        pause_s = _FIRST_RETRY_S
        while True:
            if self._end is not None:
                raise self._end
            try:
                self._port.push(head, loan)
            except zmq.Again:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)
            else:
                return

"""A client's connection to its server.

Covers connecting, the handshake, heartbeats, noticing that the server goes and connecting again.
Does not cover what is asked of it (`pie.wire.client`).

The server is up once it has answered this connection's own `Ping`, and gone when the connection
closes (its process ended, or its host acknowledged nothing for `gone_after_s`) or when nothing is
heard of it for `silent_after_s`; while this end itself stands still, no time counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from pie.page.events import Epoch
from pie.wire import codec, context, sockets
from pie.wire.address import endpoint_of, is_encrypted, prepare
from pie.wire.awake import Awake
from pie.wire.curve import wire_keys
from pie.wire.errors import BadMessage, PeerGone, WireTimeout
from pie.wire.frames import Loan
from pie.wire.messages import Message, Ping, Pong
from pie.wire.port import Outbox, Port
from pie.wire.settings import WireSettings

_log = logging.getLogger("pie.wire")

_GREET_AGAIN_S = 0.002


class Link:
    """One DEALER to one server."""

    def __init__(
        self,
        address: str,
        settings: WireSettings,
        *,
        secret: bytes | None = None,
        on_message: Callable[[Message, list[memoryview]], None],
        on_up: Callable[[Epoch], None],
        on_gone: Callable[[str], None],
    ) -> None:
        self.epoch: Epoch | None = None
        """The server's epoch while it is up."""
        self.bad_messages = 0
        self._address = address
        self._endpoint = endpoint_of(address)
        self._settings = settings
        self._keys = wire_keys(secret) if secret is not None and is_encrypted(address) else None
        self._on_message = on_message
        self._on_up = on_up
        self._on_gone = on_gone
        self._port: Port | None = None
        self._monitor: Port | None = None
        self._outbox: Outbox | None = None
        self._beat: asyncio.Task[None] | None = None
        self._is_connected = False
        self._heard_s = 0.0
        # Names the connection, so that an answer from before a break does not count as life.
        self._connection = 0

    def __str__(self) -> str:
        return self._address

    async def start(self) -> Epoch:
        """Connect and return the server's epoch.

        Raises:
            WireTimeout: It did not answer in time. The link is closed.
        """
        assert self._port is None, "A client starts once."
        self._loop = asyncio.get_running_loop()
        self._awake = Awake(self._settings.heartbeat_s, self._loop.time())
        self._up: asyncio.Future[Epoch] = self._loop.create_future()
        socket = sockets.make_dealer(context.acquire(), self._settings)
        self._monitor = sockets.watch(socket, self._on_event)
        self._port = Port(socket, self._on_parts)
        self._outbox = Outbox(self._port, ())
        prepare(socket, self._address)
        if self._keys is not None:
            self._keys.present(socket)
        socket.connect(self._endpoint)
        self._beat = asyncio.create_task(self._beats(), name=f"wire-beat {self._address}")
        limit_s = self._settings.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._up
        except TimeoutError:
            await self.close()
            raise WireTimeout(f"{self._address} did not answer within {limit_s:g} s.") from None
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Disconnect."""
        port, self._port = self._port, None
        if port is None:
            return
        self.epoch = None
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        if not self._up.done():
            self._up.set_exception(PeerGone("The client was closed."))
            self._up.exception()
        port.socket.disable_monitor()
        if self._monitor is not None:
            await self._monitor.close()
        await port.close()
        await context.release()

    async def send(self, header: bytes, loan: Loan, timeout_s: float) -> None:
        """Send a message; see `Outbox.send`."""
        if self.epoch is None or self._outbox is None:
            raise PeerGone(f"{self._address} does not answer.")
        await self._outbox.send(header, loan, timeout_s)

    def push(self, header: bytes) -> bool:
        """Send a small message at once; return whether it went."""
        if self._port is None or self._outbox is None:
            return False
        try:
            return self._outbox.push(header)
        except PeerGone:
            return False

    def reconnect(self, reason: str) -> None:
        """Leave the connection and make another."""
        if self._port is None:
            return
        self._go_down(reason)
        self._port.socket.disconnect(self._endpoint)
        self._port.socket.connect(self._endpoint)

    def _on_parts(self, parts: list[zmq.Frame]) -> None:
        if self._port is None:
            return
        self._heard_s = self._awake.now_s
        frames = [part.buffer for part in parts[1:]]
        try:
            message = codec.decode(parts[0].buffer, frames, self._settings)
        except BadMessage as error:
            self.bad_messages += 1
            _log.warning("Bad message from %s: %s", self._address, error.reason)
            return
        if isinstance(message, Pong) and message.request_id in ("", self._ping_id):
            if message.request_id and self.epoch is None and self._is_connected:
                self._go_up(message.epoch)
        else:
            self._on_message(message, frames)

    @property
    def _ping_id(self) -> str:
        return f"ping-{self._connection}"

    def _on_event(self, event: int) -> None:
        if event == sockets.HANDSHAKE_SUCCEEDED:
            self._connection += 1
            self._is_connected = True
            self._heard_s = self._awake.now_s
            self._greet()
        elif event == sockets.DISCONNECTED and self._port is not None:
            # What came before the end still counts.
            self._port.settle()
            self._port.drain()
            self._go_down(f"{self._address} disconnected.")

    def _greet(self) -> None:
        """Say hello; a moment later where zmq is not ready to send yet."""
        if self._is_connected and self.epoch is None and not self._ping():
            self._loop.call_later(_GREET_AGAIN_S, self._greet)

    def _ping(self) -> bool:
        return self.push(codec.encode(Ping(self._ping_id)))

    def _go_up(self, epoch: Epoch) -> None:
        assert self._port is not None
        self.epoch = epoch
        self._outbox = Outbox(self._port, ())
        if not self._up.done():
            self._up.set_result(epoch)
        self._on_up(epoch)

    def _go_down(self, reason: str) -> None:
        self._is_connected = False
        if self.epoch is not None:
            self.epoch = None
            if self._outbox is not None and self._port is not None:
                self._outbox.end(PeerGone(reason))
                self._outbox = Outbox(self._port, ())
            self._on_gone(reason)

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            silence_s = self._awake.beat(self._loop.time()) - self._heard_s
            if not self._is_connected:
                continue
            if silence_s > self._settings.silent_after_s:
                self.reconnect(f"{self._address} was silent for {silence_s:.1f} s.")
            else:
                self._ping()

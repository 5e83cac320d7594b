"""The listening end of the wire.

Covers accepting clients, taking their messages and handing them to a handler, and noticing that
they go. Does not cover what the messages ask for.

How a client's end is noticed: its process ends, so the transport closes, the socket's monitor
says that some connection closed, and a heartbeat to each client tells whose it was. Its host or
network ends: the kernel closes the connection after `gone_after_s`. It hangs: nothing is heard of
it for `silent_after_s`; while the server itself stands still, no time counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import zmq

from pie.page.events import Epoch
from pie.wire import codec, context, sockets
from pie.wire.address import bind, check_keys, check_listen_address, is_encrypted
from pie.wire.awake import Awake
from pie.wire.counters import WireCounters
from pie.wire.curve import wire_keys
from pie.wire.errors import AddressError, BadMessage, PeerGone, RefusedError
from pie.wire.messages import Cancel, Credit, Message, Ping, Pong, RefusalCode, Refused
from pie.wire.peer import Peer
from pie.wire.port import Port
from pie.wire.settings import WireSettings

_log = logging.getLogger("pie.wire")

Handler = Callable[[Peer, Message, Sequence[memoryview]], Awaitable[None]]
"""Carries out one message of a peer; the frames stay readable as long as they are referred to.

Runs as a task of its own, started in the order of the peer's messages. Raise `RefusedError` to
refuse; any other exception is logged and becomes `Refused(FAILED)`. `Ping`, `Pong`, `Credit` and
messages for another epoch never reach it. A `Cancel` first cancels the task of the request that
it names, if that still runs, and then comes to the handler like any message.
"""

# What was sent last, such as refusals while draining, has so long to leave after `close`.
_LINGER_S = 0.25
# zmq takes a closed connection's peer off its list a little after it says that one closed.
_LOOK_AGAIN_S = (0.0, 0.005, 0.05)
_RETRY_AFTER_S = 1.0


class WireServer:
    """Listens at one address and hands every message to one handler."""

    def __init__(
        self,
        address: str,
        handler: Handler,
        *,
        epoch: Epoch,
        on_peer: Callable[[Peer], None] | None = None,
        settings: WireSettings | None = None,
        secret: bytes | None = None,
    ) -> None:
        """Prepare a server; it listens from `start` on.

        Args:
            address: `tcp://127.0.0.1:0` (0 takes a free port), `ipc:///path` or `curve://HOST:0`.
            handler: Carries out messages.
            epoch: This start of the place; messages for any other are refused.
            on_peer: Called with each client that says hello.
            settings: Limits.
            secret: 32 bytes that all of the cluster share; a `curve://` address needs them.

        Raises:
            AddressError: The address is malformed, is in clear beyond loopback, or has no secret.
        """
        check_listen_address(address)
        check_keys(address, secret)
        self.counters = WireCounters()
        self._address = address
        self._handler = handler
        self._epoch = epoch
        self._on_peer = on_peer
        self._settings = settings or WireSettings()
        self._secret = secret
        self._peers: dict[bytes, Peer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._requests: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._handling_bytes = 0
        self._port: Port | None = None
        self._monitor: Port | None = None
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Where it listens; the real address from `start` on."""
        return self._address

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The clients that are connected."""
        return tuple(peer for peer in self._peers.values() if not peer.is_gone)

    async def start(self) -> str:
        """Listen; return the real address.

        Raises:
            AddressError: Somebody else listens there, or the address cannot be had.
        """
        assert self._port is None, "A server starts once."
        self._loop = asyncio.get_running_loop()
        self._awake = Awake(self._settings.heartbeat_s, self._loop.time())
        socket = sockets.make_router(context.acquire(), self._settings)
        try:
            # Before `bind`, so that no connection is made unwatched.
            monitor = sockets.watch(socket, self._on_event)
            self._port = Port(socket, self._on_parts)
            self._monitor = monitor
            if self._secret is not None and is_encrypted(self._address):
                wire_keys(self._secret).guard(socket)
            self._address = bind(socket, self._address)
        except AddressError:
            await self.close()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name=f"wire-sweep {self._address}")
        return self._address

    async def close(self) -> None:
        """Stop: cancel handlers, tell peers that they are gone, free the address."""
        port, self._port = self._port, None
        if port is None:
            return
        tasks = [*self._tasks, *([self._sweeper] if self._sweeper is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            peer.end("The server was closed.")
        self._peers.clear()
        if self._monitor is not None:
            port.socket.disable_monitor()
            await self._monitor.close()
        await port.close(_LINGER_S)
        await context.release()

    def _on_parts(self, parts: list[zmq.Frame]) -> None:
        """Take in one message: identity, header, payload."""
        if self._port is None:
            return
        peer = self._peer(parts[0].bytes)
        peer.heard_s = self._awake.now_s
        frames = [part.buffer for part in parts[2:]]
        self.counters.messages_in += 1
        header = parts[1].buffer if len(parts) > 1 else b""
        try:
            message = codec.decode(header, frames, self._settings)
        except BadMessage as error:
            self.counters.bad_messages += 1
            _log.warning("Bad message from %r: %s", peer, error.reason)
            peer.push(Refused(error.request_id, RefusalCode.BAD_MESSAGE, error.reason))
            return
        if peer.is_gone:
            # It was silent for too long, and what it asked for has been dropped: it starts anew.
            peer.tell_forgotten()
        elif isinstance(message, Ping):
            peer.push(Pong(message.request_id, self._epoch))
        elif isinstance(message, Credit):
            peer.credit(message.messages)
        elif isinstance(message, Pong):
            pass
        else:
            self._handle(peer, message, frames)

    def _peer(self, peer_id: bytes) -> Peer:
        peer = self._peers.get(peer_id)
        if peer is None:
            assert self._port is not None
            peer = Peer(peer_id, self._port, self._settings, self.counters)
            self._peers[peer_id] = peer
            if self._on_peer is not None:
                self._on_peer(peer)
        return peer

    def _handle(self, peer: Peer, message: Message, frames: list[memoryview]) -> None:
        """Start a task for a message, or refuse it."""
        request_id = codec.request_id_of(message)
        epoch = getattr(message, "epoch", self._epoch)
        if epoch != self._epoch:
            self.counters.stale_epochs += 1
            text = f"This is epoch {self._epoch}, and the message is for {epoch}."
            peer.push(Refused(request_id, RefusalCode.STALE_EPOCH, text))
            return
        size_bytes = sum(frame.nbytes for frame in frames)
        key = (peer.id, request_id)
        if isinstance(message, Cancel):
            # Never refused: it makes room, and would be lost.
            if (cancelled := self._requests.get(key)) is not None:
                cancelled.cancel()
        elif len(self._tasks) >= self._settings.max_handlers or (
            self._handling_bytes
            and self._handling_bytes + size_bytes > self._settings.max_handling_bytes
        ):
            self.counters.overloads += 1
            text = "Too many messages are being handled."
            peer.push(Refused(request_id, RefusalCode.OVERLOADED, text, _RETRY_AFTER_S))
            return
        self.counters.payload_bytes_in += size_bytes
        self._handling_bytes += size_bytes
        task = self._loop.create_task(self._run(peer, message, frames))
        self._tasks.add(task)
        if request_id and not isinstance(message, Cancel):
            self._requests.setdefault(key, task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._handling_bytes -= size_bytes
            if self._requests.get(key) is task:
                del self._requests[key]

        task.add_done_callback(done)

    async def _run(self, peer: Peer, message: Message, frames: list[memoryview]) -> None:
        try:
            await self._handler(peer, message, frames)
        except PeerGone:
            _log.debug("%r went while %s was handled.", peer, type(message).__name__)
        except RefusedError as error:
            peer.push(error.refusal(codec.request_id_of(message)))
        except Exception as error:  # noqa: BLE001 - the edge of what the wire carries
            self.counters.failures += 1
            _log.exception("A %s of %r failed.", type(message).__name__, peer)
            text = f"It failed with {type(error).__name__}; the server's log says more."
            request_id = codec.request_id_of(message)
            peer.push(Refused(request_id, RefusalCode.FAILED, text))

    def _on_event(self, event: int) -> None:
        if event == sockets.DISCONNECTED:
            for delay_s in _LOOK_AGAIN_S:
                self._loop.call_later(delay_s, self._look, 0.0)

    def _look(self, quiet_s: float) -> None:
        """See which peers that were quiet for so long are still connected; forget the others."""
        if self._port is None:
            return
        self._port.settle()
        now_s = self._awake.now_s
        for peer in list(self._peers.values()):
            if now_s - peer.heard_s < quiet_s:
                continue
            if not peer.probe(Pong("", self._epoch)):
                peer.end("The client disconnected.")
                del self._peers[peer.id]
            elif now_s - peer.heard_s > self._settings.silent_after_s:
                peer.end("The client was silent.")

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            self._awake.beat(self._loop.time())
            self._look(2 * self._settings.heartbeat_s)

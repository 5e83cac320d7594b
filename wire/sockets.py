"""Options of the sockets, and what their monitors tell.

Covers why each queue limit is what it is, and how the end of another host is noticed.

Nothing is dropped for being too much: a ROUTER with `ROUTER_MANDATORY` and a DEALER with
`IMMEDIATE` say that they have no room, and the sender waits. Credits and windows keep queues far
below these limits; the limits are there for a peer that does not keep to them.

zmq's own heartbeats stay off. With a full receive queue they end healthy connections, as nobody
reads what proves them healthy, and then the whole process (`Assertion failed: !_io_error`, seen
within seconds on a machine under load; zeromq/libzmq issues 3937 and 4364, open in 4.3.5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import zmq

from pie.wire.port import Port
from pie.wire.settings import WireSettings

# Messages to one peer that wait in zmq. Credit allows 32 large ones; answers are small.
_SEND_QUEUE = 1024
# More than what a client may send to a router by default.
_REFUSED_BYTES = 32 << 20

_MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED
_EVENT = struct.Struct("=hi")

HANDSHAKE_SUCCEEDED = int(zmq.Event.HANDSHAKE_SUCCEEDED)
DISCONNECTED = int(zmq.Event.DISCONNECTED)


def make_router(
    context: zmq.Context[zmq.Socket[bytes]], settings: WireSettings
) -> zmq.Socket[bytes]:
    """Return a socket for a server."""
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    _set_common(socket, settings)
    return socket


def make_dealer(
    context: zmq.Context[zmq.Socket[bytes]], settings: WireSettings
) -> zmq.Socket[bytes]:
    """Return a socket for a client."""
    socket = context.socket(zmq.DEALER)
    # Without it, messages for a server that ended wait for whoever starts there next.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    _set_common(socket, settings)
    return socket


def watch(socket: zmq.Socket[bytes], on_event: Callable[[int], None]) -> Port:
    """Call `on_event` with each change of the socket's connections."""

    def on_parts(parts: list[zmq.Frame]) -> None:
        event, _ = _EVENT.unpack(parts[0].bytes)
        on_event(event)

    return Port(socket.get_monitor_socket(_MONITORED), on_parts)


def _set_common(socket: zmq.Socket[bytes], settings: WireSettings) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
    # More than the windows of a well-behaved peer hold, so that a loop that stalls for a while does
    # not stall its transport too, which would look like a dead host.
    socket.setsockopt(zmq.RCVHWM, settings.receive_queue_messages)
    # A larger frame ends the connection before it is taken into memory, and with it all that goes over it.
    # What is only somewhat too large is refused by itself, by `pie.wire.codec`.
    largest = max(settings.max_frame_bytes, settings.max_header_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, largest + _REFUSED_BYTES)
    gone_ms = round(settings.gone_after_s * 1000)
    # The kernel ends a connection whose other host acknowledges nothing, and Pie's heartbeats see
    # to it that there is always something to acknowledge.
    socket.setsockopt(zmq.TCP_MAXRT, gone_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, gone_ms)

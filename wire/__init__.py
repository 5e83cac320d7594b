"""Sockets, and every message between processes."""

from pie.wire.client import OnMessage, WireClient
from pie.wire.errors import (
    AddressError,
    BadMessage,
    PeerGone,
    RefusedError,
    WireError,
    WireTimeout,
)
from pie.wire.frames import Buffer
from pie.wire.ids import new_request_id
from pie.wire.peer import Peer
from pie.wire.server import Handler, WireServer
from pie.wire.settings import WireSettings

__all__ = [
    "AddressError",
    "BadMessage",
    "Buffer",
    "Handler",
    "OnMessage",
    "Peer",
    "PeerGone",
    "RefusedError",
    "WireClient",
    "WireError",
    "WireServer",
    "WireSettings",
    "WireTimeout",
    "new_request_id",
]

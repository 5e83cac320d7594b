"""Encryption of connections that leave this host.

Covers CurveZMQ (Curve25519, as `curve://` addresses ask for): the keys that all of a cluster derive
from its secret, and the check that whoever connects has them. Does not cover where the secret comes
from (`pie.cluster.secret`) or which addresses need it (`pie.wire.address`).

Both sides prove that they know the secret, and neither key travels; every connection has keys of its
own besides, so that a secret that leaks later does not open what was recorded. libzmq asks a handler in
this process (ZAP, rfc.zeromq.org/spec/27) whether a client's key is the right one; without a handler it
would take any.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import lru_cache

import zmq
from blake3 import blake3
from zmq.utils import z85

from pie.wire.context import help_with

_log = logging.getLogger("pie.wire")

_KEY_BYTES = 32
_SERVER_CONTEXT = "pie 2026-11 wire: key of whoever listens"
_CLIENT_CONTEXT = "pie 2026-11 wire: key of whoever connects"

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_CURVE = b"CURVE"


@dataclass(frozen=True, slots=True, repr=False)
class KeyPair:
    """A public and a secret key in zmq's text form."""

    public: bytes
    secret: bytes


@dataclass(frozen=True, slots=True, repr=False)
class WireKeys:
    """The keys of one cluster: one pair for all that listen, one for all that connect."""

    listening: KeyPair
    connecting: KeyPair

    def guard(self, listener: zmq.Socket[bytes]) -> None:
        """Let a socket accept clients of this cluster alone; before `bind`."""
        _answer_for(listener.context)
        listener.setsockopt(zmq.CURVE_SERVER, 1)
        listener.setsockopt(zmq.CURVE_SECRETKEY, self.listening.secret)
        # The handler is told the domain with each client's key: it needs to know nothing else.
        listener.setsockopt(zmq.ZAP_DOMAIN, self.connecting.public)

    def present(self, dealer: zmq.Socket[bytes]) -> None:
        """Let a socket connect to servers of this cluster alone; before `connect`."""
        dealer.setsockopt(zmq.CURVE_SERVERKEY, self.listening.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, self.connecting.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, self.connecting.secret)


@lru_cache(maxsize=16)
def wire_keys(secret: bytes) -> WireKeys:
    """Return the keys of the cluster that has this secret."""
    return WireKeys(_pair(secret, _SERVER_CONTEXT), _pair(secret, _CLIENT_CONTEXT))


def _pair(secret: bytes, context: str) -> KeyPair:
    derived = blake3(secret, derive_key_context=context).digest(_KEY_BYTES)
    text = z85.encode(derived)
    return KeyPair(zmq.curve_public(text), text)


_lock = threading.Lock()
_answering: zmq.Context[zmq.Socket[bytes]] | None = None


def _answer_for(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """See to it that a context's clients are checked, from now on until the context ends."""
    global _answering  # noqa: PLW0603 - one handler for the one context of this process
    with _lock:
        if _answering is context:
            return
        handler = context.socket(zmq.REP)
        handler.setsockopt(zmq.LINGER, 0)
        handler.bind(_ZAP_ENDPOINT)
        name = "pie-wire-keys"
        help_with(threading.Thread(target=_answer, args=(handler,), name=name, daemon=True))
        _answering = context


def _answer(handler: zmq.Socket[bytes]) -> None:
    """Say of each client whether its key is the one that the server's domain names."""
    with handler:
        while True:
            try:
                request = handler.recv_multipart()
                handler.send_multipart(_verdict(request))
            except zmq.ContextTerminated:
                return
            except zmq.ZMQError:
                _log.exception("a client's key could not be checked")


def _verdict(request: list[bytes]) -> list[bytes]:
    """Return the answer to a ZAP request."""
    version, request_id, domain, address, _, mechanism, *credentials = request
    good = (
        version == _ZAP_VERSION
        and mechanism == _CURVE
        and len(credentials) == 1
        and z85.encode(credentials[0]) == domain
    )
    if not good:
        _log.warning(
            "%s was refused: it has another cluster's keys", address.decode("ascii", "replace")
        )
    status, text = (b"200", b"OK") if good else (b"400", b"another cluster's keys")
    return [_ZAP_VERSION, request_id, status, text, b"", b""]

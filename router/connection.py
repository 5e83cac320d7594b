"""One client's TCP connection, and how much and how long it may take of us unasked.

Covers what comes before a request is known, which uvicorn leaves open: the size of request lines,
headers and trailers, the time that they and a body that nobody wants take, requests sent ahead, the
number of connections, clients that have said all but still listen, and offers to speak another protocol,
which are passed over. Does not cover bodies (`pie.router.exchange`) or who may ask (`pie.router.app`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn._types import (
    ASGI3Application,
    ASGIReceiveCallable,
    ASGISendCallable,
    ASGISendEvent,
    Scope,
)
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pie.router.errors import ApiError, invalid, unavailable
from pie.router.metrics import RouterMetrics
from pie.router.settings import RouterSettings
from pie.router.transport import AnswerTransport

log = logging.getLogger("pie.router.connection")

_MOST_HEADERS = 256
"""An empty header takes 4 bytes on the wire and 130 here."""
_MOST_AHEAD = 8
"""Requests that a client may send before the one under way is answered."""
_LINGER_S = 1.0
"""How long a connection that was refused is read from: closed at once, it would be reset, and the
client might not see why."""
_FIRST_LOOK_S = 0.01
_LOOK_S = 0.25
"""How soon, and then how often, a client that says no more is looked after: has it gone?"""
_OFFERS = frozenset({b"upgrade", b"http2-settings"})
"""Headers, and words of `Connection`, by which a client offers another protocol."""
_NOTHING = b"HTTP/1.1 100 Continue\r\n\r\n"
"""What a client passes over before its answer, whether it asked for it or not (RFC 9110, 15.2)."""
_NO_EVENT = b"3\r\n:\n\n\r\n"
"""A comment among server-sent events, as a chunk: what a client passes over amid its answer."""


class Door:
    """What the connections of one router share.

    Args:
        settings: Limits.
        metrics: Counts what is refused.
    """

    def __init__(self, settings: RouterSettings, metrics: RouterMetrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.idle: dict[Connection, None] = {}
        """Connections that have sent nothing of a request, the longest silent first."""
        self.begun: dict[Connection, None] = {}
        """Connections that have sent a part of a request's head, the longest waited for first."""

    def make_room(self) -> bool:
        """Close the connection that has been without a request for longest, if there is one."""
        for connections in (self.idle, self.begun):
            for connection in connections:
                connection.drop()
                return True
        return False

    def forget(self, connection: Connection) -> None:
        """Note that a connection is in the middle of something, or no more."""
        self.idle.pop(connection, None)
        self.begun.pop(connection, None)


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on what a client sends before it is known to be welcome."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        door: Door,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._door = door
        self._limit_bytes = int(door.settings.max_head_bytes)
        self._timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._unanswered = 0
        """Requests under way and sent ahead."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered."""
        self._in_request = False
        """Whether the end of a request's body has not come."""
        self._said_all = False
        """Whether the client will send no more."""
        self._reading_head = True
        """Whether bytes that come now are kept by the parser or as headers, and not as a body."""
        self._moved = False
        """Whether a part of a request has ended since the last bytes came."""
        self._unfinished_bytes = 0
        """Bytes of a head or trailer whose end has not come."""
        self._head_bytes = 0
        """Bytes of the request line, headers and trailers that are there."""
        self._offers_upgrade = False
        """Whether the request that is read comes with an offer, and is to be read again without it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to listen, if there is room for one more."""
        super().connection_made(AnswerTransport(transport, self.loop))
        most = self._door.settings.max_connections
        if len(self.connections) > most and not self._door.make_room():
            if len(self.connections) > most + _MOST_AHEAD:
                transport.abort()
                return
            self._refuse(
                unavailable(
                    f"{most} connections are open (router.max_connections).",
                    self._door.settings.retry_after_s,
                    "overloaded",
                )
            )
            return
        self._door.idle[self] = None
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything, and let every request know."""
        self._door.forget(self)
        self._stop_timer()
        if self._running is not None and not self._running.response_complete:
            _disconnect(self._running)
        super().connection_lost(exc)

    # uvicorn states None; asyncio closes the connection unless it is told True.
    def eof_received(self) -> bool:  # type: ignore[override]
        """Learn that the client sends no more; it may still listen, or be gone altogether."""
        if self.transport.is_closing():
            return False
        self._door.forget(self)
        self._stop_timer()
        self._said_all = True
        if self._in_request:
            self._withdraw()
        # TLS has no half-closed connections: asyncio closes one whatever it is told.
        if not self._unanswered or self.transport.get_extra_info("sslcontext") is not None:
            return False
        self._look_after(_FIRST_LOOK_S, ask=True)
        return True

    def drop(self) -> None:
        """Close a connection that has asked for nothing."""
        self._door.forget(self)
        self._stop_timer()
        self.connections.discard(self)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        if self._is_over():
            return
        self._door.idle.pop(self, None)
        self._moved = False
        self._unset_keepalive_if_required()
        self._feed(data)
        if self._is_over():
            return
        if not self._reading_head:
            return
        self._unfinished_bytes = 0 if self._moved else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > self._limit_bytes:
            self._refuse(_too_large(self._limit_bytes))
        elif not self._unanswered and self.timeout_keep_alive_task is None:
            self._await_head()

    # Callbacks of the parser. What they raise ends the connection with `send_400_response`.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head_bytes = 0
        self._offers_upgrade = False
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take in a part of the request line."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header, or a trailer."""
        self._count(len(name) + len(value) + 4)
        if len(self.headers) >= _MOST_HEADERS:
            raise self._refused(_head_error(f"a request has at most {_MOST_HEADERS} headers"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Let the request in: from here on it is the application's to limit."""
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise self._refused(
                    ApiError(405, "CONNECT is not allowed here.", code="method_not_allowed")
                )
            self._offers_upgrade = True
            return
        hosts = sum(name == b"host" for name, _ in self.headers)
        # Whoever stands between may go by another one of several.
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            told = f"{hosts} Host headers" if hosts else "no Host header"
            raise self._refused(invalid(f"The request has {told}; HTTP/1.1 wants one.", None))
        if len(self.pipeline) >= _MOST_AHEAD:
            raise self._refused(
                ApiError(429, "Too many requests were sent ahead.", code="overloaded")
            )
        self._move(reading_head=False)
        self._stop_timer()
        self._door.forget(self)
        super().on_headers_complete()
        self._unanswered += 1
        self._in_request = True

    def on_chunk_header(self) -> None:
        """Note that a chunk begins; the one without a body is followed by trailers."""
        self._move(reading_head=True)

    def on_body(self, body: bytes) -> None:
        """Take in a part of the body."""
        if self._reading_head:
            self._move(reading_head=False)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of a request; if it has been answered already, the connection is idle."""
        if self._offers_upgrade:
            return
        self._move(reading_head=True)
        self._in_request = False
        super().on_message_complete()
        if not self._unanswered:
            self._stop_timer()
            self._door.forget(self)
            if self.cycle.keep_alive:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
                self._door.idle[self] = None

    def on_response_complete(self) -> None:
        """Note the end of an answer, and go on to what waits for it."""
        self._unanswered -= 1
        super().on_response_complete()
        if self.transport.is_closing() or self._unanswered:
            return
        if self._refusal is not None:
            self._say_refusal(self._refusal)
        elif self._said_all:
            self.transport.close()
        elif self._in_request or self._unfinished_bytes:
            # The client goes on with a body that nobody wants, or is in the middle of a head.
            self._unset_keepalive_if_required()
            self._await_head()
        elif self.timeout_keep_alive_task is not None:
            self._door.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Say why this is no request that is taken, and close."""
        if self._refusal is None and self._in_request:
            msg = "The body is not chunked as its Transfer-Encoding says."
        self._refuse(self._refusal or invalid(msg, None))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Begin to answer a request."""
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            app = _unframed(cycle, app)
        super()._start_asgi_task(cycle, app)

    def _feed(self, data: bytes) -> None:
        """Hand bytes to the parser."""
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                # With an offer the parser takes a request for one without a body: what is its body would be read
                # as the next request, and whoever stands between would give its answer to somebody else.
                data = self._head_without_offers() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("This is no HTTP request.")
                return
            else:
                return

    def _head_without_offers(self) -> bytes:
        """Return request line and headers as if the client had offered nothing (RFC 9110, 7.8)."""
        version = self.parser.get_http_version().encode()
        lines = [b" ".join((self.parser.get_method(), self.url, b"HTTP/" + version))]
        for name, value in self.headers:
            told = value
            if name == b"connection":
                words = (word.strip() for word in value.split(b","))
                told = b", ".join(word for word in words if word.lower() not in _OFFERS)
            if name not in _OFFERS and (told or not value):
                lines.append(name + b": " + told)
        return b"\r\n".join((*lines, b"", b""))

    def _is_over(self) -> bool:
        """Whether nothing that comes is looked at any more."""
        return self._refusal is not None or self._said_all or self.transport.is_closing()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._limit_bytes:
            raise self._refused(_too_large(self._limit_bytes))

    def _move(self, *, reading_head: bool) -> None:
        """Go on to another part of a request."""
        self._moved = True
        self._reading_head = reading_head
        self._unfinished_bytes = 0

    def _refused(self, error: ApiError) -> ApiError:
        """Note why the connection ends, for `send_400_response`."""
        self._refusal = error
        return error

    def _refuse(self, error: ApiError) -> None:
        """End the connection with an error, after the answers to what was asked before.

        What comes after this is not looked at.
        """
        self._refusal = error
        self._door.forget(self)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._in_request and not self._withdraw():
            # Its answer has begun, so that there is no place for another one.
            self.transport.close()
        elif not self._unanswered:
            self._say_refusal(error)

    def _withdraw(self) -> bool:
        """Forget the request whose end will not come; False where its answer has begun."""
        self._in_request = False
        if self.cycle.response_started:
            return False
        self._unanswered -= 1
        if self.pipeline and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
        _disconnect(self.cycle)
        return True

    def _say_refusal(self, error: ApiError) -> None:
        """Answer with an error and end the connection."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        self._door.metrics.requests.labels("other", str(error.status)).inc()
        log.info("a connection is refused: %d, code %s", error.status, error.code)
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _look_after(self, wait_s: float, *, ask: bool = False) -> None:
        """End what runs for a client that says no more once it is seen to have gone.

        One that has closed its socket and one that only sends no more look alike, until something
        is sent to it: the former's machine answers that there is no such connection.
        """
        self._timer = None
        if self.transport.is_closing():
            return
        if ask:
            self._ask_whether_there()
        peer = self.transport.get_extra_info("socket")
        if peer is not None and peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(wait_s, self._look_after, _LOOK_S)

    def _ask_whether_there(self) -> None:
        """Send something that changes nothing, where there is a place for it."""
        running = self._running
        if running is None or running.scope["http_version"] == "1.0":
            return
        if not running.response_started:
            self.transport.write(_NOTHING)
        elif running.chunked_encoding and not running.response_complete:
            # Only answers of server-sent events have no length.
            self.transport.write(_NO_EVENT)

    def _await_head(self) -> None:
        """Begin to wait for the rest of what comes before a request is known."""
        self._door.begun.setdefault(self)
        if self._timer is None:
            self._start_timer()

    def _start_timer(self) -> None:
        """Give the client so much time until the end of its next headers."""
        self._stop_timer()
        self._timer = self.loop.call_later(self._door.settings.head_timeout_s, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._is_over():
            return
        if self._unfinished_bytes and not self._unanswered:
            seconds = self._door.settings.head_timeout_s
            self._refuse(
                ApiError(408, f"No full headers within {seconds:g} s.", code="request_timeout")
            )
        else:
            self.transport.close()


def _unframed(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """Return an application whose answers without a length end with the connection.

    uvicorn sends them in chunks, which HTTP/1.0 does not know (RFC 9112, 7).
    """

    async def unframed(scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        has_length = True

        async def tell(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(
                    name == b"content-length" for name, _ in message.get("headers", ())
                )
                if not has_length:
                    cycle.chunked_encoding = False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length += len(message.get("body", b""))
            await send(message)

        await app(scope, receive, tell)

    return unframed


def _disconnect(cycle: RequestResponseCycle) -> None:
    """Tell a request's application that its client has gone."""
    cycle.disconnected = True
    cycle.message_event.set()


def _too_large(limit_bytes: int) -> ApiError:
    return _head_error(
        f"the request line and headers are larger than {limit_bytes} bytes (router.max_head_bytes)"
    )


def _head_error(why: str) -> ApiError:
    return ApiError(431, f"{why[:1].upper()}{why[1:]}.", code="headers_too_large")


def _answer(error: ApiError) -> bytes:
    """Return a whole HTTP answer, for when there is no request to answer by."""
    content = msgspec.json.encode(error.body())
    headers = {
        "content-type": "application/json",
        "content-length": str(len(content)),
        "connection": "close",
    } | error.headers
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
    return (status + head + "\r\n").encode("latin-1") + content

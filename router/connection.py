"""One client's TCP connection, and how much and how long it may take of us unasked.

Covers what comes before a request is known, which uvicorn leaves open: the size of request lines,
headers and trailers, the time that they and a body that nobody wants take, requests sent ahead, and
the number of connections. Does not cover bodies (`pie.router.exchange`) or who may ask
(`pie.router.app`).
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from pie.router.errors import ApiError, invalid, unavailable
from pie.router.metrics import RouterMetrics
from pie.router.settings import RouterSettings

log = logging.getLogger("pie.router.connection")

_MOST_HEADERS = 256
"""An empty header takes 4 bytes on the wire and 130 here."""
_MOST_AHEAD = 8
"""Requests that a client may send before the one under way is answered."""
_LINGER_S = 1.0
"""How long a connection that was refused is read from: closed at once, it would be reset, and the
client might not see why."""


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
        """Connections between two requests, the longest idle first."""


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
        self._asked = False
        """Whether there has been a request."""
        self._reading_head = True
        """Whether bytes that come now are kept by the parser or as headers, and not as a body."""
        self._moved = False
        """Whether a part of a request has ended since the last bytes came."""
        self._unfinished_bytes = 0
        """Bytes of a head or trailer whose end has not come."""
        self._head_bytes = 0
        """Bytes of the request line, headers and trailers that are there."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to listen, if there is room for one more."""
        super().connection_made(transport)
        most = self._door.settings.max_connections
        if len(self.connections) > most:
            idle = next(iter(self._door.idle), None)
            if idle is not None:
                idle.drop()
            elif len(self.connections) > most + _MOST_AHEAD:
                transport.abort()
                return
            else:
                self._refuse(
                    unavailable(
                        f"{most} connections are open (router.max_connections).",
                        self._door.settings.retry_after_s,
                        "overloaded",
                    )
                )
                return
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go of everything."""
        self._door.idle.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close an idle connection."""
        self._door.idle.pop(self, None)
        self.connections.discard(self)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Take in what the client sent."""
        if self._is_over():
            return
        self._door.idle.pop(self, None)
        self._moved = False
        super().data_received(data)
        if self._is_over():
            return
        if not self._reading_head:
            return
        self._unfinished_bytes = 0 if self._moved else self._unfinished_bytes + len(data)
        if self._unfinished_bytes > self._limit_bytes:
            self._refuse(_too_large(self._limit_bytes))
        elif self._timer is None and self._answered and self.timeout_keep_alive_task is None:
            self._start_timer()

    # Callbacks of the parser. What they raise ends the connection with `send_400_response`.

    def on_message_begin(self) -> None:
        """Begin a request."""
        self._head_bytes = 0
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
        if len(self.pipeline) >= _MOST_AHEAD:
            raise self._refused(
                ApiError(429, "Too many requests were sent ahead.", code="overloaded")
            )
        self._move(reading_head=False)
        self._stop_timer()
        super().on_headers_complete()
        self._asked = True

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
        self._move(reading_head=True)
        super().on_message_complete()
        if self._answered and not self.pipeline:
            self._stop_timer()
            if self.cycle.keep_alive:
                self.timeout_keep_alive_task = self.loop.call_later(
                    self.timeout_keep_alive, self.timeout_keep_alive_handler
                )
                self._door.idle[self] = None

    def on_response_complete(self) -> None:
        """Note the end of an answer."""
        super().on_response_complete()
        if self.transport.is_closing() or not self._answered or self.pipeline:
            return
        if self.cycle.more_body:
            # The client goes on with a body that nobody wants.
            self._unset_keepalive_if_required()
            self._start_timer()
        elif self.timeout_keep_alive_task is not None:
            self._door.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Say why this is no request that is taken, and close."""
        self._refuse(self._refusal or invalid(msg, None))

    @property
    def _answered(self) -> bool:
        """Whether no request is under way."""
        return not self._asked or self.cycle.response_complete

    def _is_over(self) -> bool:
        """Whether nothing that comes is looked at any more."""
        return self._refusal is not None or self.transport.is_closing()

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
        """Answer with an error and end the connection; what comes after this is not looked at."""
        self._refusal = error
        self._stop_timer()
        self._unset_keepalive_if_required()
        if not self._answered:
            # In the middle of an answer there is no place for another one.
            self.transport.close()
            return
        self._door.metrics.requests.labels("other", str(error.status)).inc()
        log.info("a connection is refused: %d, code %s", error.status, error.code)
        self.transport.write(_answer(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

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
        if self._unfinished_bytes and self._answered:
            seconds = self._door.settings.head_timeout_s
            self._refuse(
                ApiError(408, f"No full headers within {seconds:g} s.", code="request_timeout")
            )
        else:
            self.transport.close()


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

"""One HTTP request and its answer.

Covers reading a body within its limits, answering once or as server-sent events, and noticing
that the client has gone. Does not cover what is asked (`pie.router.app`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from pie.router.access import ANYBODY
from pie.router.errors import ApiError, overloaded, server_error, shown
from pie.router.settings import RouterSettings
from pie.router.sse import DONE, event
from pie.router.turns import Turns
from pie.router.waiting import Begun, within

log = logging.getLogger("pie.router.exchange")

JSON = "application/json"
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_PARSED_HERE_BYTES = 128 << 10
"""Half a millisecond for a text; a hundred thousand digits and brackets take three."""
_WATCHED_AFTER_S = 0.01
"""How long something is waited for before its client is looked after."""
T = TypeVar("T")
_encode = msgspec.json.Encoder().encode


def new_request_id() -> str:
    """Return a name that no other request has."""
    return secrets.token_hex(12)


class ClientGoneError(Exception):
    """Nobody is left to answer: the client hung up or takes nothing."""


class BodyBudget:
    """Bytes of all bodies that are being read, and the threads where large ones are parsed.

    Args:
        most_bytes: The cap.
        retry_after_s: What a client is told to wait for whom there is no room.
        turns: Where large ones are parsed, their tenants in turn.
    """

    def __init__(self, most_bytes: int, retry_after_s: float, turns: Turns) -> None:
        self.turns = turns
        self._most_bytes = most_bytes
        self._retry_after_s = retry_after_s
        self.used_bytes = 0

    def take(self, size: int) -> None:
        """Count bytes in.

        Raises:
            ApiError: 429; they are counted in all the same, until they are given back.
        """
        self.used_bytes += size
        if self.used_bytes > self._most_bytes:
            raise overloaded(
                "Too many large bodies are being read (router.body_budget_bytes).",
                self._retry_after_s,
            )

    def give_back(self, size: int) -> None:
        """Count bytes out."""
        self.used_bytes -= size


class Exchange:
    """One request and its answer, on top of ASGI."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        settings: RouterSettings,
        bodies: BodyBudget,
    ) -> None:
        self.scope = scope
        self.request_id = new_request_id()
        """Names the request in its answer, in logs and at workers; nobody else has it."""
        self.arrived_s = time.monotonic()
        self.status = 0
        """Of the answer; 0 until it has begun."""
        self.caller = ANYBODY
        """Who asks; known once that was looked at."""
        self._receive = receive
        self._send = send
        self._settings = settings
        self._bodies = bodies
        self._streaming = False
        self._first: list[asyncio.Task[None]] = []
        self._headers: dict[bytes, bytes] | None = None

    def header(self, name: bytes) -> str | None:
        """Return a header of the request by its lower-case name; the last one counts."""
        if self._headers is None:
            self._headers = dict(self.scope["headers"])
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """Return the JSON body.

        Raises:
            ApiError: It is too large, comes too slowly, is compressed, or is not said to be JSON.
            ClientGoneError: The client hung up.
        """
        told = self.header(b"content-type")
        kind = (told or "").partition(";")[0].strip().lower()
        # Also where it is missing: a page can have a browser send anything to any host but with this type.
        if kind != JSON and not kind.endswith("+json"):
            raise ApiError(
                415,
                f"Content-Type is {shown(kind) if kind else 'missing'}; send the body as {JSON}.",
                code="unsupported_media_type",
            )
        coding = (self.header(b"content-encoding") or "").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(
                415,
                f"Content-Encoding is {shown(coding)}; send the body as it is.",
                code="unsupported_media_type",
                headers={"accept-encoding": "identity"},
            )
        limit = int(self._settings.max_body_bytes)
        length = self.header(b"content-length")
        if length is not None and length.isdecimal() and int(length) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        until_s = time.monotonic() + self._settings.body_total_timeout_s
        try:
            while True:
                message = await self._next_part(until_s)
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    size -= len(part)
                    raise _too_large(limit)
                self._bodies.take(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            self._bodies.give_back(size)

    async def parsed(self, parse: Callable[[bytes], T]) -> T:
        """Read the JSON body and return what `parse` makes of it, in a thread where it is large.

        Raises:
            ApiError: See `body`, `in_time`, and whatever `parse` raises.
            ClientGoneError: The client hung up.
        """
        return await self.parsed_from(await self.body(), parse)

    async def parsed_from(self, data: bytes, parse: Callable[[bytes], T]) -> T:
        """Return what `parse` makes of `data`, as `parsed` does.

        Raises:
            ApiError: See `in_time`, and whatever `parse` raises.
            ClientGoneError: The client hung up.
        """
        if len(data) <= _PARSED_HERE_BYTES:
            return parse(data)
        bodies = self._bodies
        try:
            bodies.take(len(data))
            return await self.in_time(bodies.turns.run(self.caller.tenant, lambda: parse(data)))
        finally:
            bodies.give_back(len(data))

    async def in_time(self, work: Awaitable[T]) -> T:
        """Return what comes of `work`, such as a prompt that waits for a thread, while somebody waits for it.

        The body must have been read. Work that is given up is cancelled.

        Raises:
            ApiError: 504; the request has no more time.
            ClientGoneError: The client hung up.
        """
        # Most work is done at once, and then timers and a task would take longer than the work.
        begun = Begun(work)
        if begun.is_over:
            return begun.result
        limit_s = self._settings.request_timeout_s
        loop = asyncio.get_running_loop()
        watching: list[asyncio.Task[None]] = []
        gone = False

        def end() -> None:
            nonlocal gone
            gone = True
            if not limit.expired():
                limit.reschedule(loop.time())

        def begin() -> None:
            watching.append(loop.create_task(self.watch(end)))

        later = loop.call_later(_WATCHED_AFTER_S, begin)
        try:
            async with asyncio.timeout(limit_s - (time.monotonic() - self.arrived_s)) as limit:
                return await begun
        except TimeoutError:
            if gone:
                raise ClientGoneError from None
            raise server_error(f"No full answer within {limit_s:g} s.", "timeout", 504) from None
        finally:
            later.cancel()
            for watch in watching:
                watch.cancel()

    def finish_first(self, work: Coroutine[object, object, None]) -> None:
        """Begin `work`, which is over before the client has all of its answer, whatever comes of it."""
        self._first.append(asyncio.create_task(work))

    async def watch(self, gone: Callable[[], None]) -> None:
        """Call `gone` when the client hangs up; the body must have been read."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                gone()
                return

    async def respond(
        self,
        status: int,
        content: bytes,
        headers: Mapping[str, str] | None = None,
        content_type: str = JSON,
    ) -> None:
        """Answer at once."""
        await self._finish()
        length = {"content-type": content_type, "content-length": str(len(content))}
        await self._begin(status, length | dict(headers or {}))
        await self._push({"type": "http.response.body", "body": content})

    async def respond_json(
        self, status: int, content: object, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer at once with JSON."""
        await self.respond(status, _encode(content), headers)

    async def refuse(self, error: ApiError) -> None:
        """Say what is wrong: as the answer, or as the last event of one that has begun."""
        if not self.status:
            await self.respond_json(error.status, error.body(), error.headers)
        elif self._streaming:
            await self.end_stream([error.body()])

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        """Begin an answer of server-sent events."""
        self._streaming = True
        kind = {"content-type": "text/event-stream; charset=utf-8"}
        await self._begin(200, kind | _STREAM_HEADERS | dict(headers))

    async def send_events(self, events: Iterable[object]) -> None:
        """Send events; waits where the client is slow."""
        content = b"".join(map(event, events))
        if content:
            await self._push({"type": "http.response.body", "body": content, "more_body": True})

    async def end_stream(self, events: Iterable[object] = ()) -> None:
        """Send last events and end the answer."""
        await self._finish()
        content = b"".join(map(event, events)) + DONE
        self._streaming = False
        await self._push({"type": "http.response.body", "body": content})

    async def _finish(self) -> None:
        first, self._first = self._first, []
        for result in await asyncio.gather(*first, return_exceptions=True) if first else ():
            if isinstance(result, Exception):
                log.error("before an answer's end", exc_info=result)

    async def _next_part(self, until_s: float) -> Message:
        """Wait for the next part of the body, which must be there as a whole by `until_s`."""
        settings = self._settings
        left_s = until_s - time.monotonic()
        try:
            return await within(min(settings.body_timeout_s, left_s), self._receive())
        except TimeoutError:
            raise ApiError(
                408,
                f"No more of the body came for {settings.body_timeout_s:g} s."
                if left_s > settings.body_timeout_s
                else f"The body took longer than {settings.body_total_timeout_s:g} s.",
                code="request_timeout",
                headers={"connection": "close"},
            ) from None

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        await self._push(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.encode("latin-1"), value.encode("latin-1", errors="replace"))
                    for name, value in (("x-pie-request-id", self.request_id), *headers.items())
                ],
            }
        )

    async def _push(self, message: Message) -> None:
        """Hand a part of the answer on; waits while the client's buffer is full."""
        try:
            await within(self._settings.send_timeout_s, self._send(message))
        except (TimeoutError, OSError) as error:
            raise ClientGoneError from error


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {limit} bytes (router.max_body_bytes).",
        code="request_too_large",
    )

"""What those who run a router may ask of it beyond its status.

Covers `/admin`: why requests went where they went, and that a worker leaves or takes requests again. Does not cover who may ask (`pie.router.app`) or records of requests
(`pie.router.explain`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from pie.index.errors import PageIndexError
from pie.page.events import PlaceId
from pie.router.api.explained import ExplainedList
from pie.router.api.places import DrainBody, WorkerDrained, WorkerTakesAgain
from pie.router.errors import ApiError, invalid, shown, unavailable
from pie.router.exchange import Exchange
from pie.router.explain import ExplainStore
from pie.router.link import WorkerLink
from pie.router.workers import WorkerSet
from pie.wire import RefusedError, WireError
from pie.wire.malformed import why_malformed
from pie.wire.messages import RefusalCode

_LISTED = 100
_TAKES_AGAIN_S = 10.0
_RETRY_AFTER_S = 2.0
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-", "resp_")


class Admin:
    """Handlers of `/admin`."""

    def __init__(self, explained: ExplainStore, workers: WorkerSet) -> None:
        self._explained = explained
        self._workers = workers

    async def drain(self, exchange: Exchange) -> None:
        """Let a worker take no more requests and hand on what only it has; answer when that is over."""
        name = str(exchange.scope["path_params"]["worker"])
        if exchange.header(b"content-type") is None:
            # A page in somebody's browser can send a body without a type to any host, unasked.
            raise ApiError(415, "Content-Type is missing.", code="unsupported_media_type")
        data = await exchange.body()
        try:
            body = msgspec.json.decode(data, type=DrainBody)
        except msgspec.DecodeError as error:
            raise invalid(f"body: {why_malformed(data, error)}", "body") from error
        link = self._link(name)
        with _told(name):
            done = await link.drain(body.timeout_s)
        await exchange.respond_json(200, WorkerDrained(name, done.moved, done.left))

    async def take_again(self, exchange: Exchange) -> None:
        """Let a worker take requests again that was drained, or is."""
        name = str(exchange.scope["path_params"]["worker"])
        link = self._link(name)
        with _told(name):
            await link.take_again(timeout_s=_TAKES_AGAIN_S)
        await exchange.respond_json(200, WorkerTakesAgain(name))

    def _link(self, name: str) -> WorkerLink:
        link = self._workers.links.get(PlaceId(name))
        if link is None:
            known = ", ".join(sorted(self._workers.links)) or "none"
            text = f"There is no worker {shown(name)}; those that are up: {known}."
            raise ApiError(404, text, param="worker", code="not_found")
        return link

    async def requests(self, exchange: Exchange) -> None:
        """Answer with the names of the latest requests."""
        known = await self._explained.latest(_LISTED)
        listed = ExplainedList(known.names, known.count, known.used_bytes)
        await exchange.respond_json(200, listed)

    async def request(self, exchange: Exchange) -> None:
        """Answer with what became of one request."""
        name = str(exchange.scope["path_params"]["request_id"])
        asked = name
        for prefix in _ANSWER_PREFIXES:
            # An answer's `id` is its request's with this before it.
            asked = asked.removeprefix(prefix)
        try:
            record = await self._explained.get(asked)
        except PageIndexError as error:
            text = f"Request {shown(name)!r} was not this router's, and what others know cannot be had now."
            raise unavailable(text, _RETRY_AFTER_S, "explanations_unavailable") from error
        if record is None:
            raise ApiError(
                404,
                f"Nothing is known of request {shown(name)!r}: it never reached a worker, is still "
                "under way, or is older than what is kept "
                "(router.explained_requests, router.explained_bytes, router.kept_s).",
                param="request_id",
                code="not_found",
            )
        await exchange.respond(200, record)


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """Say why a worker does not do what it was told."""
    try:
        yield
    except WireError as error:
        if isinstance(error, RefusedError) and error.code is not RefusalCode.STALE_EPOCH:
            raise ApiError(409, f"{name}: {error.message}", code="worker_refused") from error
        raise ApiError(503, f"{name}: {error}", code="worker_down") from error

"""What those who run a router may ask of it beyond its status: why requests went where they went.

Covers `/admin`. Does not cover who may ask (`pie.router.app`) or records of requests
(`pie.router.explain`).
"""

from __future__ import annotations

from pie.router.api.explained import ExplainedList
from pie.router.errors import ApiError, shown
from pie.router.exchange import Exchange
from pie.router.explain import ExplainStore

_LISTED = 100
_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


class Admin:
    """Handlers of `/admin`."""

    def __init__(self, explained: ExplainStore) -> None:
        self._explained = explained

    async def requests(self, exchange: Exchange) -> None:
        """Answer with the names of the latest requests."""
        store = self._explained
        await exchange.respond_json(
            200, ExplainedList(store.latest(_LISTED), len(store), store.used_bytes)
        )

    async def request(self, exchange: Exchange) -> None:
        """Answer with what became of one request."""
        name = str(exchange.scope["path_params"]["request_id"])
        asked = name
        for prefix in _ANSWER_PREFIXES:
            # An answer's `id` is its request's with this before it.
            asked = asked.removeprefix(prefix)
        record = self._explained.get(asked)
        if record is None:
            raise ApiError(
                404,
                f"Nothing is known of request {shown(name)!r}: it never reached a worker, is still "
                "under way, was another router's, or is older than what is kept "
                "(router.explained_requests, router.explained_bytes).",
                param="request_id",
                code="not_found",
            )
        await exchange.respond(200, record)

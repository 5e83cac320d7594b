"""`/admin/policies`: policies are looked at and applied through a router.

Covers reading versions and applying a text that is acceptable. Does not cover who may ask
(`pie.router.access`), how places come to run a version (`pie.index.policy_follower`) or commands
(`pie.cluster.policy_edit`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp

from pie.index.errors import IndexStrangeError, IndexUncertainError, PageIndexError
from pie.index.orders import Orders
from pie.index.policy_store import PolicyStore
from pie.index.settings import IndexSettings
from pie.policies.errors import PolicyFileError, Problem
from pie.policies.policy_set import PolicySet
from pie.policies.tag_warnings import unknown_tenants
from pie.policies.versions import PolicyVersions
from pie.router.api.policies import (
    Applied,
    ApplyBody,
    PolicyEventLine,
    PolicyEvents,
    PolicyPlaceLine,
    PolicyReport,
    PolicyText,
    PolicyVersionLine,
    RefusedEditLine,
)
from pie.router.endpoint import Handler
from pie.router.errors import ApiError, invalid, shown
from pie.router.exchange import Exchange
from pie.wire.malformed import why_malformed

_MOST_NOTE_CHARS = 200
_MOST_EVENTS = 200
_NUMBER = re.compile(r"[0-9]{1,15}")

T = TypeVar("T")


class PolicyDesk:
    """Handlers of `/admin/policies`.

    Args:
        policies: This router's: a text that it cannot take on is not applied.
        tenant_tags: Returns the tags of known tenants' pages; None where tenants are not known.
        short_prefixes: Warns of named prefixes that fill no page of a model that is served.
        index_url: Redis.
        index: Key prefix and time limits.
    """

    def __init__(
        self,
        policies: PolicyVersions,
        tenant_tags: Callable[[], Collection[str] | None],
        short_prefixes: Callable[[PolicySet], Awaitable[list[Problem]]],
        index_url: str,
        index: IndexSettings | None,
    ) -> None:
        self._policies = policies
        self._tenant_tags = tenant_tags
        self._short_prefixes = short_prefixes
        self._index_url = index_url
        self._index = index

    def routes(self, endpoint: Callable[[Handler], ASGIApp]) -> list[Route]:
        """Return the paths; `endpoint` makes an application of a handler."""
        get, post = ["GET"], ["POST"]
        return [
            Route("/admin/policies", endpoint(self.show), methods=get),
            Route("/admin/policies", endpoint(self.apply), methods=post),
            Route("/admin/policies/events", endpoint(self.events), methods=get),
            Route("/admin/policies/versions/{version}", endpoint(self.text), methods=get),
        ]

    async def text(self, exchange: Exchange) -> None:
        """Answer with the text of one version; of 0 with what this router's configuration names."""
        named = str(exchange.scope["path_params"]["version"])
        number = int(named) if _NUMBER.fullmatch(named) else -1
        if not number:
            await exchange.respond_json(200, PolicyText(0, self._policies.own.text))
            return
        version = None if number < 0 else await self._asked(lambda store: store.version(number))
        if version is None:
            text = (
                f"There is no version {shown(named)}; `/admin/policies` lists those that are kept."
            )
            raise ApiError(404, text, param="version", code="not_found")
        await exchange.respond_json(200, PolicyText(number, version.text))

    async def show(self, exchange: Exchange) -> None:
        """Answer with versions and places."""
        report = await self._asked(self._report)
        number = report.version
        version = await self._asked(lambda store: store.version(number)) if number else None
        told = "" if version is None else await self._policies.file_differs(number, version.text)
        await exchange.respond_json(200, msgspec.structs.replace(report, file_differs=told))

    async def file_differs(self, number: int) -> str:
        """Return that the version that this router runs says something else than its configuration's file."""
        return await self._policies.file_differs(number, self._policies.current.text)

    async def apply(self, exchange: Exchange) -> None:
        """Put a text in force everywhere."""
        data = await exchange.body()
        try:
            body = msgspec.json.decode(data, type=ApplyBody)
        except msgspec.DecodeError as error:
            raise invalid(f"body: {why_malformed(data, error)}", "body") from error
        try:
            policies = await asyncio.to_thread(self._policies.read, 0, body.text)
        except PolicyFileError as error:
            raise invalid("\n".join(map(str, error.problems)), "text") from error
        warnings = [*policies.warnings, *await self._short_prefixes(policies)]
        tags = self._tenant_tags()
        if tags is not None:
            warnings += unknown_tenants(policies.patterns, tags)
        note = body.note[:_MOST_NOTE_CHARS]
        version = await self._asked(
            lambda store: store.current() if body.check else store.apply(body.text, note)
        )
        await exchange.respond_json(200, Applied(version, [str(one) for one in warnings]))

    async def events(self, exchange: Exchange) -> None:
        """Answer with what cluster policies did lately."""

        def work() -> PolicyEvents:
            orders = Orders(self._index_url, self._index)
            try:
                found = orders.events(_MOST_EVENTS)
            finally:
                orders.close()
            return PolicyEvents([PolicyEventLine(**msgspec.structs.asdict(one)) for one in found])

        await exchange.respond_json(200, await self._on_thread(work))

    async def _asked(self, ask: Callable[[PolicyStore], T]) -> T:
        """Ask Redis on a thread.

        Raises:
            ApiError: It does not answer.
        """

        def work() -> T:
            store = PolicyStore(self._index_url, self._index)
            try:
                return ask(store)
            finally:
                store.close()

        return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work)
        except IndexStrangeError as error:
            raise ApiError(503, str(error), code="index_down") from error
        except PageIndexError as error:
            # 503 says that nothing has changed.
            status = 504 if isinstance(error, IndexUncertainError) else 503
            text = f"The index does not answer: {error}"
            raise ApiError(status, text, code="index_down") from error

    def _report(self, store: PolicyStore) -> PolicyReport:
        edit = store.refused()
        refused = None
        if edit is not None:
            refused = RefusedEditLine(edit.file, edit.at_unix_s, list(edit.problems))
        return PolicyReport(
            version=store.current(),
            versions=[
                PolicyVersionLine(number, one.applied_unix_s, one.note, one.text_bytes)
                for number, one in store.versions().items()
            ],
            places=[
                PolicyPlaceLine(place, one.version, one.refused, one.reason)
                for place, one in store.places().items()
            ],
            refused=refused,
        )

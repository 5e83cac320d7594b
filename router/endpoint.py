"""One handler as an ASGI application: who may ask, and what goes wrong.

Covers errors in OpenAI's shape for all that a handler raises, and counting requests. Does not cover who
has which key (`pie.router.access`) or which path does what (`pie.router.app`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from pie.router.access import Access
from pie.router.errors import ApiError, server_error
from pie.router.exchange import BodyBudget, ClientGoneError, Exchange
from pie.router.metrics import RouterMetrics
from pie.router.pages import Pages
from pie.router.settings import RouterSettings

log = logging.getLogger("pie.router.endpoint")

Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """A handler that asks who is there and tells what is wrong.

    Args:
        handler: Answers.
        settings: Limits of bodies and of waiting.
        metrics: Counts requests.
        bodies: The room that all bodies share.
        pages: Which pages in a browser may ask.
        access: Who may ask; None for anybody.
        admin: Whether it is for those who run the router.
    """

    def __init__(
        self,
        handler: Handler,
        settings: RouterSettings,
        metrics: RouterMetrics,
        bodies: BodyBudget,
        *,
        pages: Pages,
        access: Access | None,
        admin: bool = False,
    ) -> None:
        self._handler = handler
        self._bodies = bodies
        self._settings = settings
        self._metrics = metrics
        self._pages = pages
        self._access = access
        self._admin = admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        exchange = Exchange(scope, receive, send, self._settings, self._bodies)
        route = getattr(scope.get("route"), "path", "other")
        try:
            try:
                self._pages.check(exchange)
                if self._access is not None:
                    given = exchange.header(b"authorization")
                    exchange.caller = self._access.caller(given, admin=self._admin)
                await self._handler(exchange)
            except ApiError as error:
                if error.status >= 500:
                    log.warning("%s: %d %s", route, error.status, error.logged)
                else:
                    told = (error.status, error.code, _field(error))
                    log.info("%s: %d, code %s, param %s", route, *told)
                await exchange.refuse(error)
            except ClientGoneError:
                exchange.status = exchange.status or 499
            # Whatever else goes wrong is our own bug: it is logged, and the client is told so.
            except Exception:
                log.exception("%s failed", route)
                await exchange.refuse(server_error("The router failed."))
        except ClientGoneError:
            exchange.status = exchange.status or 499
        self._metrics.requests.labels(route, str(exchange.status)).inc()


def _field(error: ApiError) -> str | None:
    """Return which field is wrong as a log says it: no name that a client made up, and nothing within."""
    if error.param is None or error.code == "unknown_parameter":
        return None
    named = re.match(r"[a-z_-]+", error.param)
    return None if named is None else named[0]

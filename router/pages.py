"""Which pages in a browser may ask, told by what a browser says of each request and no page can change.

Covers `Origin`, `Sec-Fetch-Site`, `Host`, and telling a browser whose page may read. Does not cover keys
(`pie.router.access`). What is no browser sends no `Origin` and is let through.

Any page can have its visitor's browser send requests to any address that the browser can reach, loopback
included, and needs no leave for it as long as it does not read the answer. A name that a page's owner
makes lead to this host ("DNS rebinding") even makes the two one origin; only `Host` tells.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from pie.router.errors import ApiError, shown
from pie.router.exchange import Exchange
from pie.router.openapi import ANSWER_HEADERS
from pie.router.settings import RouterSettings

_READS = frozenset({"GET", "HEAD"})
"""What changes nothing and starts nothing: a foreign page cannot read the answer."""
_OWN = frozenset({"same-origin", "none"})


class Pages:
    """Lets pages of some origins ask.

    Args:
        settings: The origins, and whether a key is needed.
    """

    def __init__(self, settings: RouterSettings) -> None:
        self._origins = frozenset(settings.cors_origins)
        self._any = "*" in self._origins
        # Where a key is needed, a page of a name that leads here has none.
        self._checks_host = not settings.asks_for_a_key
        self._hosts = {settings.host.lower(), *filter(None, map(_name, self._origins))}

    def let_read(self, app: Starlette) -> None:
        """Have a browser let pages of listed origins read what `app` answers."""
        if not self._origins:
            return
        app.add_middleware(
            CORSMiddleware,
            allow_origins=sorted(self._origins),
            allow_methods=["GET", "POST", "DELETE"],
            # Clients have headers of their own, such as OpenAI's `x-stainless-lang`.
            allow_headers=["*"],
            expose_headers=list(ANSWER_HEADERS),
        )

    def check(self, exchange: Exchange) -> None:
        """Refuse what a page of another origin asks.

        Raises:
            ApiError: 403, or 421 for a name that is not this router's.
        """
        if self._any:
            return
        host = exchange.header(b"host") or ""
        if self._checks_host and not self._is_here(host):
            raise ApiError(
                421,
                f"Host is {shown(host)!r}, and a router that asks for no key answers to addresses, to names "
                "without a dot, and to the hosts of router.cors_origins: a page in a browser could have "
                "made the name lead here.",
                code="host_not_allowed",
            )
        if exchange.scope["method"] in _READS:
            return
        origin, site = exchange.header(b"origin"), exchange.header(b"sec-fetch-site")
        if origin in self._origins or site in _OWN:
            return
        if site is None and (origin is None or urlsplit(origin).netloc == host.lower()):
            return
        raise ApiError(
            403,
            f"A page of {shown(origin or 'another origin')} may not ask here: "
            "it is not among router.cors_origins.",
            code="origin_not_allowed",
        )

    def _is_here(self, host: str) -> bool:
        """Say whether nobody else can have made a name lead here."""
        name = _name(f"//{host}")
        if not name or "." not in name or name.endswith(".localhost") or name in self._hosts:
            return True
        return _is_address(name)


def _name(url: str) -> str:
    """Return the host of a URL, without its port; nothing where there is none."""
    try:
        return (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True

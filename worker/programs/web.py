"""HTTP for programs, where the operator grants it.

Covers what is granted, which addresses a name may lead to, asking, and limits of size and time. Does not
cover how many a program may have under way (`pie.worker.programs.errands`). For one event loop.

A request goes to an address that was looked up and checked here, and to no other: a name that leads
to another address a moment later changes nothing. No redirect is followed, no proxy and no
credentials of the host are used, and no connection is used twice.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from pie.wire.frames import Buffer
from pie.wire.programs import HttpAnswer, HttpCall, Trouble
from pie.worker.programs.trouble import CallError
from pie.worker.settings import HttpGrant, Origin, ProgramSettings, default_port

if TYPE_CHECKING:
    import httpx

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a name, for a port."""

_MOST_ADDRESSES = 4
"""Of one name that are tried."""
_MOST_HEADERS = 64
_MOST_HEADER_CHARS = 16_384
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_OURS = frozenset(
    ("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer")
) | {"upgrade", "expect", "proxy-authorization", "proxy-connection"}
"""Headers that say how a request travels."""
_LOGGERS = ("httpx", "httpcore")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


class Web:
    """Asks on behalf of programs. Use `close`.

    Args:
        settings: What is granted, and the limits.
        resolve: Looks names up.
        client: Made at the first request; None makes the one that is meant.
    """

    def __init__(
        self,
        settings: ProgramSettings,
        *,
        resolve: Resolve | None = None,
        client: Callable[[], httpx.AsyncClient] | None = None,
    ) -> None:
        self._settings = settings
        self._resolve = resolve or _addresses_of
        self._new_client = client or new_client
        self._client: httpx.AsyncClient | None = None

    async def ask(self, call: HttpCall, body: bytes) -> tuple[HttpAnswer, Sequence[Buffer]]:
        """Carry out a program's request.

        Raises:
            CallError: It is not granted, cannot be meant, or brought nothing.
        """
        # With the command's libraries: a worker without grants does not load it.
        import httpx  # noqa: PLC0415

        limit_s = self._settings.http_timeout_s
        try:
            url = httpx.URL(call.url)
            origin = _origin(url)
            grant = self._grant(origin, call.method)
            headers = _headers(call.headers)
            if len(body) > int(self._settings.http_bytes):
                raise _bad(f"the body is larger than {self._settings.http_bytes} bytes{_SIZE}")
            async with asyncio.timeout(limit_s):
                addresses = await self._addresses(origin, grant)
                return await self._ask(call, url, origin, headers, body, addresses)
        except TimeoutError as error:
            raise _failed(f"{call.url} has not answered within {limit_s:g} s{_TIME}") from error
        except httpx.InvalidURL as error:
            raise _bad(f"{call.url!r} is no URL: {error}") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise _failed(f"{call.url} cannot be asked: {why}") from error

    async def close(self) -> None:
        """Let go of the client."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _grant(self, origin: Origin, method: str) -> HttpGrant:
        grants = [one for one in self._settings.http if one.is_for(origin)]
        if not grants:
            raise _refused(
                f"programs may not ask {_text(origin)}: no grant names it "
                f'([programs] http = [{{origin = "{_text(origin)}"}}])'
            )
        for grant in grants:
            if method in grant.methods:
                return grant
        methods = sorted({one for grant in grants for one in grant.methods})
        raise _refused(
            f"programs may ask {_text(origin)} by {', '.join(methods)} and not by {method} "
            "([programs] http, methods)"
        )

    async def _addresses(self, origin: Origin, grant: HttpGrant) -> list[str]:
        """Return where a granted origin may be reached.

        Raises:
            CallError: Its name leads nowhere, or to addresses that are not public and not granted.
        """
        _, host, port = origin
        if _is_address(host):
            return [host]  # The grant names this very address.
        try:
            found = await self._resolve(host, port)
        except OSError as error:
            raise _failed(f"{host} leads to no address: {error.strerror or error}") from error
        if grant.private:
            allowed = found
        elif host == "localhost":
            allowed = [one for one in found if ipaddress.ip_address(one).is_loopback]
        else:
            allowed = [one for one in found if is_public(one)]
        if not allowed:
            raise _refused(
                f"{host} leads to addresses that are not public, and its grant does not say "
                "private = true ([programs] http)"
            )
        return list(dict.fromkeys(allowed))[:_MOST_ADDRESSES]

    async def _ask(
        self,
        call: HttpCall,
        url: httpx.URL,
        origin: Origin,
        headers: list[tuple[str, str]],
        body: bytes,
        addresses: Sequence[str],
    ) -> tuple[HttpAnswer, Sequence[Buffer]]:
        import httpx  # noqa: PLC0415

        client = self._client = self._client or self._new_client()
        # The name goes into `Host` and TLS, which checks the certificate against it; the address into the URL.
        headers = [("host", _netloc(origin)), *headers]
        failed: httpx.ConnectError | None = None
        for address in addresses:
            try:
                async with client.stream(
                    call.method,
                    url.copy_with(host=address),
                    headers=headers,
                    content=body or None,
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                ) as answer:
                    data = await self._read(answer, call.url)
                    told = tuple(
                        (name.lower(), value) for name, value in answer.headers.multi_items()
                    )
                    return HttpAnswer(call.call, answer.status_code, told), [data]
            except httpx.ConnectError as error:
                failed = error  # Nothing was sent: another address may do.
        assert failed is not None
        raise failed

    async def _read(self, answer: httpx.Response, url: str) -> bytes:
        limit, data = int(self._settings.http_bytes), bytearray()
        # As it came: what is unpacked may be far larger than what came.
        async for piece in answer.aiter_raw():
            data += piece
            if len(data) > limit:
                raise _failed(f"the answer of {url} is larger than {limit} bytes{_SIZE}")
        return bytes(data)


def new_client() -> httpx.AsyncClient:
    """Return a client that takes nothing from this host but its certificate authorities."""
    import httpx  # noqa: PLC0415

    # It would log each URL, which may hold what programs know of their users; who asks for that is told.
    for name in _LOGGERS:
        if (logger := logging.getLogger(name)).level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
    authorities = httpx.create_ssl_context(trust_env=False)
    authorities.load_default_certs()
    return httpx.AsyncClient(
        verify=authorities,
        trust_env=False,
        follow_redirects=False,
        timeout=None,  # noqa: S113 - the whole request has a limit
        # A connection is known by its address, and two names may share one.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        headers={"user-agent": "pie-inferlet", "accept-encoding": "identity"},
    )


def is_public(address: str) -> bool:
    """Say whether an address is one of the public internet, whatever it is wrapped in."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found.teredo is not None or found in _NAT64:
            return False
        if inner is not None:
            return inner.is_global and not inner.is_multicast
    return found.is_global and not found.is_multicast


async def _addresses_of(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


def _origin(url: httpx.URL) -> Origin:
    if url.scheme not in ("http", "https") or not url.host:
        raise _bad(f"{url} is no URL of http or https")
    if url.userinfo:
        raise _bad("a URL with a user in it: send an authorization header instead")
    host = url.raw_host.decode("ascii").lower()
    return (url.scheme, host, url.port or default_port(url.scheme))


def _headers(given: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    if len(given) > _MOST_HEADERS or sum(len(n) + len(v) for n, v in given) > _MOST_HEADER_CHARS:
        raise _bad(f"more than {_MOST_HEADERS} headers, or {_MOST_HEADER_CHARS} characters of them")
    for name, value in given:
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise _bad(f"{name!r}: {value!r} is no header")
        if name.lower() in _OURS:
            raise _bad(f"the header {name} is not a program's to set")
    return list(given)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _netloc(origin: Origin) -> str:
    scheme, host, port = origin
    host = f"[{host}]" if ":" in host else host
    return host if port == default_port(scheme) else f"{host}:{port}"


def _text(origin: Origin) -> str:
    return f"{origin[0]}://{_netloc(origin)}"


_SIZE = " ([programs] http_bytes)"
_TIME = " ([programs] http_timeout_s)"


def _bad(message: str) -> CallError:
    return CallError(Trouble.BAD_CALL, message)


def _refused(message: str) -> CallError:
    return CallError(Trouble.NOT_ALLOWED, message)


def _failed(message: str) -> CallError:
    return CallError(Trouble.HTTP_FAILED, message)

"""How Redis is reached: one server, a master that Sentinels know, or a Cluster.

Covers what an `[index] url` may say. Does not cover connecting (`pie.index.client`).

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]               one server; `rediss` for TLS
    unix://[[USER]:PASSWORD@]/PATH/TO/SOCKET[?db=DB]         the same, on this host
    redis+sentinel://[…@]HOST[:PORT][,HOST[:PORT]…]/NAME[/DB]  the master NAME; `rediss+sentinel`
    redis+cluster://[…@]HOST[:PORT][,HOST[:PORT]…]           a Cluster; `rediss+cluster`

User and password are those of the servers; Sentinels' own are `?sentinel_username=…&sentinel_password=…`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from redis.asyncio.connection import parse_url

_PORTS = {"sentinel": 26379, "cluster": 6379}
_SENTINELS_OWN = ("sentinel_username", "sentinel_password")


class Deployment(enum.Enum):
    """What a URL leads to."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True)
class RedisAddress:
    """A URL, taken apart."""

    deployment: Deployment
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """Sentinels, or some nodes of a Cluster; empty for one server."""
    master: str
    """What Sentinels call it; empty for the others."""
    options: dict[str, Any]
    """Options of a connection, as `redis` names them."""
    sentinel_options: dict[str, Any]


def parse_address(url: str) -> RedisAddress:
    """Take a URL apart.

    Raises:
        ValueError: It says nothing that is understood; the message says why.
    """
    scheme, _, _ = url.partition("://")
    plain, _, kind = scheme.partition("+")
    if not kind:
        return RedisAddress(Deployment.SERVER, plain == "rediss", (), "", {**parse_url(url)}, {})
    if plain not in ("redis", "rediss") or kind not in _PORTS:
        raise ValueError(f"the scheme is {scheme!r}, not redis+sentinel or redis+cluster")
    split = urlsplit(url)
    login, _, listed = split.netloc.rpartition("@")
    hosts = tuple(_host(item, _PORTS[kind]) for item in listed.split(","))
    query = parse_qsl(split.query)
    path = [unquote(part) for part in split.path.split("/") if part]
    master = database = ""
    if kind == "sentinel":
        if not path:
            raise ValueError("the name of the master is missing, as in redis+sentinel://HOST/NAME")
        master, database, path = path[0], "".join(path[1:2]), path[2:]
    if path or (database and not database.isdecimal()):
        raise ValueError(
            "behind the hosts there is no path for a Cluster, and NAME or NAME/DATABASE for Sentinels"
        )
    rest = urlencode([(name, value) for name, value in query if name not in _SENTINELS_OWN])
    at = f"{login}@" if login else ""
    options = {**parse_url(f"{plain}://{at}host/{database}?{rest}")}
    for name in ("host", "connection_class"):
        options.pop(name, None)
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    own = {name.removeprefix("sentinel_"): value for name, value in query if name in _SENTINELS_OWN}
    return RedisAddress(
        Deployment(kind),
        plain == "rediss",
        hosts,
        master,
        options,
        {**tls, **own, **({"ssl": True} if plain == "rediss" else {})},
    )


def _host(item: str, port: int) -> tuple[str, int]:
    """Return host and port of an item such as `a`, `a:1` or `[::1]:1`."""
    try:
        split = urlsplit(f"//{item}")
        if split.hostname:
            return split.hostname, split.port or port
    except ValueError:
        pass
    raise ValueError(f"{item!r} is not HOST or HOST:PORT")

"""How Redis is reached: one server, a master that Sentinels know, or a Cluster.

Covers what an `[index] url` may say, and saying it without passwords. Does not cover connecting
(`pie.index.client`).

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]               one server; `rediss` for TLS
    unix://[[USER]:PASSWORD@]/PATH/TO/SOCKET[?db=DB]         the same, on this host
    redis+sentinel://[…@]HOST[:PORT][,HOST[:PORT]…]/NAME[/DB]  the master NAME; `rediss+sentinel`
    redis+cluster://[…@]HOST[:PORT][,HOST[:PORT]…]           a Cluster; `rediss+cluster`

User and password are those of the servers; Sentinels' own are `?sentinel_username=…&sentinel_password=…`.
Options of TLS are in `TLS_FILES` and `ssl_check_hostname`. Nothing else may be said: what a client
would make of more, such as decoded answers, the index does not understand.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote

TLS_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS = (*TLS_FILES, "ssl_check_hostname")
_TLS_SAID = f"{', '.join(_TLS)}, with rediss in the scheme"
_SENTINELS_OWN = ("sentinel_username", "sentinel_password")
_SCHEMES = {
    f"{plain}{kind}" for plain in ("redis", "rediss") for kind in ("", "+sentinel", "+cluster")
} | {"unix"}
_MOST_DATABASES = 1 << 31
_ENCODED = "in a user or password `/` is written %2F, `?` %3F, `#` %23 and `@` %40"
_HOST = re.compile(r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^\s:,\[\]]+)(?::(?P<port>[0-9]{1,5}))?")


class Deployment(enum.Enum):
    """What a URL leads to."""

    SERVER = "server"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


_PORTS = {Deployment.SERVER: 6379, Deployment.SENTINEL: 26379, Deployment.CLUSTER: 6379}


@dataclass(frozen=True)
class RedisAddress:
    """A URL, taken apart."""

    deployment: Deployment
    tls: bool
    hosts: tuple[tuple[str, int], ...]
    """The server, Sentinels, or some nodes of a Cluster; empty for a socket on this host."""
    path: str = ""
    """Of a socket on this host; empty for the others."""
    master: str = ""
    """What Sentinels call it; empty for the others."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of a connection to a server, as `redis` names them."""
    sentinel_options: dict[str, Any] = field(default_factory=dict)


def masked(text: str) -> str:
    """Return a text without the users and passwords of a URL in it, whatever they are made of."""
    if "password=" in text.rpartition("@")[0]:  # All that follows may be more of a password.
        return re.sub(r"(:/{0,2}).*?(['\"]?)\Z", r"\1***\2", text, count=1, flags=re.DOTALL)
    text = re.sub(r"(:/{0,2}).*@", r"\1***@", text, flags=re.DOTALL)
    return re.sub(r"(password=).*?(['\"]?)\Z", r"\1***\2", text, count=1, flags=re.DOTALL)


def parse_address(url: str) -> RedisAddress:
    """Take a URL apart.

    Raises:
        ValueError: It says nothing that is understood; the message says why, and holds no password.
    """
    scheme, there, behind = url.partition("://")
    if not there or scheme not in _SCHEMES:
        raise ValueError(f"it does not begin with one of {', '.join(sorted(_SCHEMES))} and ://")
    plain, _, kind = scheme.partition("+")
    found = re.fullmatch(r"([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", behind, re.DOTALL)
    assert found is not None
    authority, path, query, fragment = (part or "" for part in found.groups())
    login, at, listed = authority.rpartition("@")
    is_unix = plain == "unix"
    if fragment or "@" in query or ("@" in path and not is_unix) or (is_unix and listed):
        if is_unix and listed and not at and "@" not in behind:
            raise ValueError("a socket is named by its whole path, as in unix:///PATH/TO/SOCKET")
        raise ValueError(f"{_ENCODED}, and so they are behind the host")
    options = _login(login)
    if is_unix:
        return _socket(path, query, options)
    deployment = Deployment(kind or "server")
    items = [listed] if deployment is Deployment.SERVER else listed.split(",")
    hosts = tuple(_host(item, _PORTS[deployment]) for item in items)
    master, database = _behind(path, deployment)
    if database:
        options["db"] = _database(database)
    tls = plain == "rediss"
    own = _SENTINELS_OWN if deployment is Deployment.SENTINEL else ()
    said = _options(query, (*(_TLS if tls else ()), *own), "" if tls else f"; of TLS: {_TLS_SAID}")
    tls_options: dict[str, Any] = {name: said[name] for name in TLS_FILES if name in said}
    if "ssl_check_hostname" in said:
        tls_options["ssl_check_hostname"] = _yes_or_no("ssl_check_hostname", said)
    return RedisAddress(
        deployment,
        tls,
        hosts,
        master=master,
        options=options | tls_options,
        sentinel_options={
            **tls_options,
            **{name.removeprefix("sentinel_"): said[name] for name in own if name in said},
            **({"ssl": True} if tls else {}),
        },
    )


def _login(text: str) -> dict[str, Any]:
    user, _, password = text.partition(":")
    found = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in found.items() if value}


def _socket(path: str, query: str, options: dict[str, Any]) -> RedisAddress:
    if not path:
        raise ValueError("the path of the socket is missing, as in unix:///PATH/TO/SOCKET")
    said = _options(query, ("db",))
    if "db" in said:
        options["db"] = _database(said["db"])
    return RedisAddress(Deployment.SERVER, False, (), path=unquote(path), options=options)


def _behind(path: str, deployment: Deployment) -> tuple[str, str]:
    """Return the name of the master and the database that are behind the hosts; empty where none is."""
    parts = [unquote(part) for part in path.removesuffix("/").split("/")[1:]]
    master = ""
    if deployment is Deployment.SENTINEL:
        if not parts or not parts[0]:
            raise ValueError("the name of the master is missing, as in redis+sentinel://HOST/NAME")
        master, *parts = parts
    if parts and deployment is Deployment.CLUSTER:
        raise ValueError("a Cluster has one database: there is nothing behind the hosts")
    if len(parts) > 1:
        raise ValueError("there is more behind the host than a database")
    return master, parts[0] if parts else ""


def _host(item: str, port: int) -> tuple[str, int]:
    """Return host and port of an item such as `a`, `a:1` or `[::1]:1`."""
    found = _HOST.fullmatch(item)
    # What is behind the colon may be a password whose @HOST was forgotten.
    host = item.partition(":")[0]
    if not host:
        raise ValueError("a host is missing: each is HOST, HOST:PORT or [ADDRESS]:PORT")
    if found is None:
        raise ValueError(f"{host!r} is not HOST, HOST:PORT or [ADDRESS]:PORT")
    if found["port"] is not None:
        port = int(found["port"])
        if not 1 <= port <= 65_535:
            raise ValueError(f"the port of {host!r} is none from 1 to 65535")
    return found["host"].strip("[]"), port


def _database(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= _MOST_DATABASES:
        raise ValueError(
            "the database is a number from 0, such as 3, and nothing else is behind it"
        )
    return int(text)


def _options(query: str, allowed: tuple[str, ...], hint: str = "") -> dict[str, str]:
    """Return the options of a URL, each of which is one of `allowed`, said once, and not empty."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in allowed:
            # What is behind a password that is not encoded looks like an option.
            shown = "an option" if any("password" in one for one in found) else f"option {name!r}"
            raise ValueError(f"{shown} is not known; allowed: {', '.join(allowed) or 'none'}{hint}")
        if name in found or not value:
            raise ValueError(f"option {name!r} is said once, and with a value")
        found[name] = value
    return found


def _yes_or_no(name: str, said: dict[str, str]) -> bool:
    if said[name] not in ("true", "false"):
        raise ValueError(f"option {name!r} is true or false")
    return said[name] == "true"

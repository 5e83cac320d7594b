"""Connections to Redis.

Covers how clients are made, how long they may be waited for, and how their errors become ours. Does
not cover what is said over them (`pie.index.remote`, `pie.index.feed`, `pie.index.lookup`).

Limits are set here, around whole commands, and not in the client: there they would be set by
`asyncio.wait_for`, which in Python 3.11 loses a cancellation that comes together with an answer, so
that a closing task goes on. A connection is torn, not shut, when a command on it was cut short: what
it has not sent yet is never sent, and nobody waits for a server that stands still.
"""

from __future__ import annotations

import random
from asyncio import timeout
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cached_property
from typing import Any, cast

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.asyncio.sentinel
import redis.cluster
import redis.sentinel
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import (
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import NoBackoff
from redis.exceptions import (
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    ResponseError,
    TryAgainError,
)
from redis.retry import Retry

from pie.index.address import Deployment, RedisAddress, parse_address
from pie.index.errors import (
    IndexDeniedError,
    IndexRefusedError,
    IndexStrangeError,
    IndexUnavailableError,
)
from pie.index.sentences import sentence
from pie.index.settings import IndexSettings

CLUSTER_ANSWER_S = 2.0
"""Longest wait for one answer of a Cluster's node, the time included that a command waits there."""

_ASKING_WHERE: dict[str, Any] = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
"""One Sentinel or node that stands still leaves time to ask others, within `request_timeout_s`."""

_DENIED = ("invalid username-password pair", "WRONGPASS", "Authentication required", "NOAUTH")
"""Words and not classes: a Cluster's client says them of each node in an error of another class."""

_FIRST_WAIT_S = 0.05
_JITTER = random.Random()
"""Of its own: who seeds the common one, as tests of properties do, relies on nobody else drawing from it."""


class _Torn(AbstractConnection):
    """A connection that ends at once, whatever is under way."""

    async def disconnect(
        self,
        nowait: bool = True,  # noqa: ARG002
        error: Exception | None = None,
        failure_count: int | None = None,
        health_check_failed: bool = False,
    ) -> None:
        """End; never waits for the server."""
        if self._writer is not None:
            self._writer.transport.abort()
        await super().disconnect(True, error, failure_count, health_check_failed)

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Send; a connection that was torn while it was being made is one that broke."""
        try:
            await super().send_packed_command(command, check_health)
        except AttributeError as error:
            if self._writer is not None:
                raise
            raise redis.ConnectionError("the connection was let go of") from error


class _TornConnection(_Torn, Connection):
    pass


class _TornSSLConnection(_Torn, SSLConnection):
    pass


class _TornUnixConnection(_Torn, UnixDomainSocketConnection):
    pass


class _TornSentinelConnection(_Torn, SentinelManagedConnection):
    pass


class _TornSentinelSSLConnection(_Torn, SentinelManagedSSLConnection):
    pass


class _SentinelPool(SentinelConnectionPool):
    """Connections to the master, and those to the Sentinels that say where it is."""

    async def aclose(self) -> None:
        """End both."""
        await super().aclose()
        for sentinel in self.sentinel_manager.sentinels:
            await sentinel.aclose()


def make_async_client(url: str) -> redis.asyncio.Redis:
    """Return a client that does not connect yet, and waits as long as `asking` lets it.

    For a Cluster it is a `redis.asyncio.RedisCluster`, which takes the same commands.

    Raises:
        ValueError: `url` is none that `parse_address` understands.
    """
    address = parse_address(url)
    if address.deployment is Deployment.CLUSTER:
        return cast("redis.asyncio.Redis", _async_cluster(address))
    options: dict[str, Any] = {
        **address.options,
        "protocol": 2,
        "socket_timeout": None,
        "socket_connect_timeout": None,
        # Publisher and feed decide themselves when to try again: they have a mode to keep.
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    if address.deployment is Deployment.SENTINEL:
        manager = redis.asyncio.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            address.hosts,
            sentinel_kwargs={
                **_ASKING_WHERE,
                **address.sentinel_options,
                "retry": AsyncRetry(NoBackoff(), 0),
            },
        )
        managed = _TornSentinelSSLConnection if address.tls else _TornSentinelConnection
        pool = _SentinelPool(address.master, manager, connection_class=managed, **options)  # type: ignore[no-untyped-call]
        return redis.asyncio.Redis.from_pool(pool)
    kind: type[AbstractConnection] = _TornUnixConnection
    if address.path:
        options["path"] = address.path
    else:
        kind = _TornSSLConnection if address.tls else _TornConnection
        options["host"], options["port"] = address.hosts[0]
    return redis.asyncio.Redis.from_pool(ConnectionPool(connection_class=kind, **options))


def _async_cluster(address: RedisAddress) -> redis.asyncio.RedisCluster:
    cluster = redis.asyncio.RedisCluster(
        startup_nodes=[redis.asyncio.cluster.ClusterNode(*host) for host in address.hosts],
        ssl=address.tls,
        **_within_cluster(address),
        retry=AsyncRetry(NoBackoff(), 0),
    )
    torn = _TornSSLConnection if address.tls else _TornConnection
    cluster.nodes_manager.connection_kwargs["connection_class"] = torn
    for node in cluster.nodes_manager.startup_nodes.values():
        node.connection_class = torn
    return cluster


def _within_cluster(address: RedisAddress) -> dict[str, Any]:
    # Unlike those of one server these limits are the client's own, so that it goes on to another node.
    return {
        **address.options,
        **_ASKING_WHERE,
        "protocol": 2,
        "socket_timeout": CLUSTER_ANSWER_S,
        "max_connections": 4_096,
    }


def make_client(url: str, settings: IndexSettings) -> redis.Redis:
    """Return a blocking client, for tools.

    Raises:
        ValueError: `url` is none that `parse_address` understands.
    """
    address = parse_address(url)
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_timeout": settings.request_timeout_s,
        "socket_connect_timeout": settings.request_timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if address.deployment is Deployment.CLUSTER:
        return cast("redis.Redis", _LateCluster(address, options))
    options |= address.options | ({"ssl": True} if address.tls else {})
    if address.deployment is Deployment.SENTINEL:
        manager = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
            address.hosts,
            sentinel_kwargs={
                **_ASKING_WHERE,
                **address.sentinel_options,
                "retry": Retry(NoBackoff(), 0),
            },
        )
        client = manager.master_for(address.master, redis_class=redis.Redis, **options)  # type: ignore[no-untyped-call]
        return cast("redis.Redis", client)
    if address.path:
        return redis.Redis(unix_socket_path=address.path, **options)
    host, port = address.hosts[0]
    return redis.Redis(host=host, port=port, **options)


class _LateCluster:
    """A client of a Cluster that connects at its first command, as all others do."""

    def __init__(self, address: RedisAddress, options: dict[str, Any]) -> None:
        self._address = address
        self._options = options

    @cached_property
    def _client(self) -> redis.RedisCluster:
        return redis.RedisCluster(
            startup_nodes=[
                redis.cluster.ClusterNode(*host)  # type: ignore[no-untyped-call]
                for host in self._address.hosts
            ],
            ssl=self._address.tls,
            **self._address.options,
            **self._options,
        )

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)

    def close(self) -> None:
        """Disconnect, if there was a connection."""
        if "_client" in self.__dict__:
            self._client.close()


@contextmanager
def translated() -> Iterator[None]:
    """Turn whatever a Redis client raises into `IndexUnavailableError` or what is below it."""
    try:
        yield
    except (TimeoutError, redis.RedisError, RedisClusterException, OSError) as error:
        said = f"Redis: {sentence(str(error)) or 'no answer in time'}"
        if is_strange(error):
            raise IndexStrangeError(said) from error
        passing = isinstance(
            error, OutOfMemoryError | ReadOnlyError | ClusterDownError | TryAgainError
        )
        # Where it was a script that came upon it, an older Redis has the word in the middle.
        passing = passing or "-OOM " in said or "-READONLY " in said
        if isinstance(error, ResponseError) and not passing:
            raise IndexRefusedError(said) from error
        if any(word in str(error) for word in _DENIED):
            raise IndexDeniedError(said) from error
        raise IndexUnavailableError(said) from error


def is_strange(answer: object) -> bool:
    """Say whether Redis answered that a key holds something of another type than ours."""
    # Where it was a script that came upon it, an older Redis has the word in the middle.
    return isinstance(answer, ResponseError) and "WRONGTYPE" in str(answer)


def raise_others(answers: Iterable[object]) -> None:
    """Raise the first of several answers that is an error, unless it is that a key is strange."""
    for answer in answers:
        if isinstance(answer, Exception) and not is_strange(answer):
            raise answer


@asynccontextmanager
async def asking(limit_s: float) -> AsyncIterator[None]:
    """Give what is inside so long, and turn its errors into ours."""
    with translated():
        async with timeout(limit_s):
            yield


async def check_login(url: str, limit_s: float) -> None:
    """See whether Redis takes user and password; one that does not answer in time is not judged.

    Raises:
        IndexDeniedError: It does not.
    """
    client = make_async_client(url)
    try:
        async with asking(limit_s):
            await client.ping()
    except IndexDeniedError:
        raise
    except IndexUnavailableError:
        return
    finally:
        await client.aclose()


async def look_anew(client: redis.asyncio.Redis) -> None:
    """Let a client that got no answer find out who answers now; one of a single server knows.

    A Cluster's node that stands still is not seen to be gone by commands that are cut short.
    """
    if is_cluster(client):
        await client.aclose()


def is_cluster(client: redis.asyncio.Redis) -> bool:
    """Say whether a client is one of a Cluster."""
    said: object = client  # typed as what `make_async_client` says that it is
    return isinstance(said, redis.asyncio.RedisCluster)


class Backoff:
    """How long to wait before the next try: twice as long each time, up to a limit, with jitter."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._next_s = min(_FIRST_WAIT_S, limit_s)

    def reset(self) -> None:
        """Begin again: it worked."""
        self._next_s = min(_FIRST_WAIT_S, self._limit_s)

    def next_s(self) -> float:
        """Return seconds to wait. Jitter keeps a cluster's places from coming back all at once."""
        wait_s = self._next_s * _JITTER.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._limit_s)
        return wait_s

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
from typing import Any

import redis
import redis.asyncio
from redis.asyncio.connection import (
    AbstractConnection,
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
    parse_url,
)
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from pie.index.errors import IndexRefusedError, IndexStrangeError, IndexUnavailableError
from pie.index.settings import IndexSettings

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


class _TornConnection(_Torn, Connection):
    pass


class _TornSSLConnection(_Torn, SSLConnection):
    pass


class _TornUnixConnection(_Torn, UnixDomainSocketConnection):
    pass


_CLASSES: dict[type[AbstractConnection], type[AbstractConnection]] = {
    Connection: _TornConnection,
    SSLConnection: _TornSSLConnection,
    UnixDomainSocketConnection: _TornUnixConnection,
}


def make_async_client(url: str) -> redis.asyncio.Redis:
    """Return a client that does not connect yet, and waits as long as `asking` lets it."""
    options: dict[str, Any] = {**parse_url(url)}
    plain = options.pop("connection_class", Connection)
    pool = ConnectionPool(
        connection_class=_CLASSES[plain],
        **{
            **options,
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": None,
            # Publisher and feed decide themselves when to try again: they have a mode to keep.
            "retry": AsyncRetry(NoBackoff(), 0),
        },
    )
    return redis.asyncio.Redis.from_pool(pool)


def make_client(url: str, settings: IndexSettings) -> redis.Redis:
    """Return a blocking client, for tools."""
    return redis.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=settings.request_timeout_s,
        socket_connect_timeout=settings.request_timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def translated() -> Iterator[None]:
    """Turn whatever a Redis client raises into `IndexUnavailableError` or what is below it."""
    try:
        yield
    except (TimeoutError, redis.RedisError, OSError) as error:
        said = f"Redis: {str(error) or 'no answer in time'}"
        if is_strange(error):
            raise IndexStrangeError(said) from error
        passing = isinstance(error, OutOfMemoryError | ReadOnlyError)
        if isinstance(error, ResponseError) and not passing:
            raise IndexRefusedError(said) from error
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

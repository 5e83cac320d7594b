"""Connections to Redis.

Covers how clients are made and how their errors become ours. Does not cover what is said over them
(`pie.index.publisher`, `pie.index.feed`, `pie.index.lookup`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from pie.index.errors import IndexUnavailableError
from pie.index.settings import IndexSettings

_FIRST_WAIT_S = 0.05


def make_async_client(url: str, settings: IndexSettings) -> redis.asyncio.Redis:
    """Return a client that answers or raises within `request_timeout_s`; it does not connect yet."""
    return redis.asyncio.Redis.from_url(
        url,
        protocol=2,
        socket_timeout=settings.request_timeout_s,
        socket_connect_timeout=settings.request_timeout_s,
        # Publisher and feed decide themselves when to try again: they have a mode to keep.
        retry=AsyncRetry(NoBackoff(), 0),
    )


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
    """Turn whatever a Redis client raises into `IndexUnavailableError`."""
    try:
        yield
    except (TimeoutError, redis.RedisError, OSError) as error:
        said = str(error) or type(error).__name__
        raise IndexUnavailableError(f"Redis: {said}") from error


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
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._limit_s)
        return wait_s

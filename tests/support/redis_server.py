"""A real Redis server for tests: one for each test process, and a key prefix for each test."""

import itertools
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings

_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[EmbeddedServer]:
    """A server that the tests of this process share: never stop it, and never flush it."""
    folder = Path(tempfile.mkdtemp(prefix="pie-redis-"))
    server = EmbeddedServer(folder, persist=False)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)


@pytest.fixture
def own_redis_server() -> Iterator[EmbeddedServer]:
    """A started server of the test's own, with persistence, to be killed, flushed and paused."""
    folder = Path(tempfile.mkdtemp(prefix="pie-redis-"))
    server = EmbeddedServer(folder)
    server.start()
    yield server
    server.kill()
    shutil.rmtree(folder)


@pytest.fixture
def redis_url(redis_server: EmbeddedServer) -> str:
    """The shared server's address."""
    return redis_server.url


@pytest.fixture
def index_settings(redis_url: str) -> IndexSettings:
    """Settings for the shared server: keys that no other test sees, and patience, for it never is away.

    What a busy machine does late is then neither a server that does not answer nor a place that has died.
    """
    return IndexSettings(
        url=redis_url,
        key_prefix=f"test{next(_prefixes)}",
        ttl_s=2.0,
        poll_s=0.05,
        request_timeout_s=20.0,
    )

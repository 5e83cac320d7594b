"""A real S3 server for tests: one for each test process, and a prefix for each test."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pie.pool.settings import PoolSettings

if TYPE_CHECKING:
    from pie.cluster.local_s3 import LocalS3

_prefixes = itertools.count(1)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[LocalS3]:
    """A server that the tests of this process share: never stop it."""
    yield from _server()


@pytest.fixture
def own_s3_server() -> Iterator[LocalS3]:
    """A started server of the test's own, to be killed and started again."""
    yield from _server()


@pytest.fixture
def s3_settings(s3_server: LocalS3) -> PoolSettings:
    """Settings for the shared server, and a prefix that no other test sees."""
    return settings_for(s3_server)


def settings_for(server: LocalS3, **more: object) -> PoolSettings:
    """Return settings for a server: short times, and a prefix of their own unless one is given."""
    return settings_for_url(server.url, **more)


def settings_for_url(url: str, **more: object) -> PoolSettings:
    """Return settings for the server at `url`; see `settings_for`."""
    given: dict[str, object] = {
        "object_bucket": "pages",
        "object_endpoint_url": url,
        "object_prefix": f"test{next(_prefixes)}",
        "object_budget": "64MiB",
        "object_attempts": 2,
        "object_connect_timeout_s": 10,
        "object_read_timeout_s": 60,
        **more,
    }
    return PoolSettings.model_validate(given)


def _server() -> Iterator[LocalS3]:
    # Only tests that want a server pay for importing boto3.
    from pie.cluster.local_s3 import ENVIRONMENT, LocalS3  # noqa: PLC0415

    # Read by boto3 wherever a test, or a process that it starts, makes a client.
    os.environ.update(ENVIRONMENT, AWS_EC2_METADATA_DISABLED="true", AWS_CONFIG_FILE="/nowhere")
    folder = Path(tempfile.mkdtemp(prefix="pie-s3-"))
    server = LocalS3(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder)

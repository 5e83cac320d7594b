"""A cluster that the live tests share, and the client that talks to it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.support.serving import Serving


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A cluster of two workers with SmolLM2; tests must leave it as it was."""
    serving = Serving(tmp_path_factory.mktemp("cluster"), {"PIE_PROGRAMS__ALLOW": "true"})
    try:
        serving.wait_until_said("Ctrl-C stops it")
        serving.wait_until_ready(workers=2)
        yield serving
    finally:
        serving.stop()


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, its path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="pie", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def client(cluster: Serving) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as one:
        yield one

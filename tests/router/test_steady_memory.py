"""A router's memory is the same after many requests: nothing is kept of those that are over, but what is bounded."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from pie.router import conversations, demand
from tests.router.conftest import Cluster

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.timeout(1800)]

WARM = 10_000
WINDOWS = 3
WINDOW = 10_000
MOST_BYTES = 100
"""Of growth for each request: less than anything that could be kept of one."""


def _bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


async def test_nothing_grows_with_the_number_of_requests(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is bounded is full once it is warm.
    monkeypatch.setattr(demand, "_MOST_GROUPS", 1_000)
    monkeypatch.setattr(conversations, "_MOST", 1_000)
    for name in ("w0", "w1"):
        cluster.mock(name, quiet=True)
    router = await cluster.router(
        2,
        explained_requests=100,
        remembered_bytes="256KiB",
        tokenised_bytes="256KiB",
        responses_bytes="256KiB",
    )
    at = urlsplit(router.url)
    client = subprocess.Popen(  # noqa: ASYNC220 – it returns at once
        [
            *(sys.executable, "-m", "tests.router.many_client"),
            *(str(at.hostname), str(at.port), router.status().models[0], "8"),
        ],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    async def make(requests: int) -> None:
        assert client.stdin is not None
        assert client.stdout is not None
        client.stdin.write(f"{requests}\n")
        client.stdin.flush()
        assert await asyncio.to_thread(client.stdout.readline) == "done\n"

    try:
        await make(WARM)
        held = [_bytes()]
        for _ in range(WINDOWS):
            await make(WINDOW)
            held.append(_bytes())
    finally:
        client.kill()
        client.communicate()
    log.info("RSS after each window: %s", [f"{one / 2**20:.1f} MiB" for one in held])
    # The first one after the warm-up still finds its way about the heap.
    assert held[-1] - held[1] < MOST_BYTES * WINDOW * (WINDOWS - 1)
    assert router.status().requests >= WARM + WINDOWS * WINDOW

"""A router with 10,000 streams that say little: what they take, that others are served, that all is freed."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from pie.router.connection import Connection
from pie.router.generation import Generation
from pie.router.service import RouterService
from tests.router.conftest import Cluster, until

pytestmark = [pytest.mark.live, pytest.mark.soak, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)

STREAMS = 10_000
CLIENTS = 4
WAIT_S = 300.0
MOST_KIB = 96
"""Of the router's memory, for each stream."""


class Client:
    """A process with a share of the streams."""

    def __init__(self, service: RouterService, model: str, count: int) -> None:
        at = urlsplit(service.url)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.router.idle_client"),
                *(str(at.hostname), str(at.port), model, str(count)),
            ],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    async def line(self) -> str:
        assert self._process.stdout is not None
        return await asyncio.to_thread(self._process.stdout.readline)

    async def came(self) -> tuple[int, int]:
        """Return how many bytes have come since all were open, and how many streams have ended."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        bytes_, ended = (await self.line()).split()
        return int(bytes_), int(ended)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@asynccontextmanager
async def streams(service: RouterService, model: str) -> AsyncIterator[list[Client]]:
    """Open all, and close them at the end."""
    clients = [Client(service, model, STREAMS // CLIENTS) for _ in range(CLIENTS)]
    try:
        for client in clients:
            assert await asyncio.wait_for(client.line(), WAIT_S) == "open\n"
        yield clients
    finally:
        for client in clients:
            client.close()


def _kib() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss) // 1024


def _alive() -> int:
    """Return how many sequences and connections there are in this process."""
    gc.collect()
    return sum(isinstance(one, Generation | Connection) for one in gc.get_objects())


async def test_ten_thousand_streams_are_held_served_and_let_go(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < STREAMS + 1_000:
        pytest.skip(f"this machine allows {hard} open files for a process")
    for name in ("w0", "w1"):
        cluster.mock(name, token_delay_s=20.0, quiet=True)
    router = await cluster.router(
        2,
        max_in_flight=STREAMS + 100,
        max_connections=STREAMS + 100,
        token_gap_timeout_s=300.0,
        explained_requests=10,
    )
    model = router.status().models[0]

    async def ask() -> float:
        began_s = time.monotonic()
        body = {"model": model, "prompt": "Once", "max_tokens": 1}
        answer = await http.post(f"{router.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return time.monotonic() - began_s

    for _ in range(200):
        await ask()
    told: dict[str, object] = {"streams": STREAMS}
    before_kib, after = _kib(), list[int]()
    for round_ in (1, 2):
        began_s = time.monotonic()
        async with streams(router, model) as clients:
            told[f"opened_s_{round_}"] = round(time.monotonic() - began_s, 1)
            assert router.status().in_flight == STREAMS
            assert _alive() >= 2 * STREAMS
            held_kib = (_kib() - before_kib) / STREAMS
            told[f"kib_a_stream_{round_}"] = round(held_kib, 1)
            assert held_kib < MOST_KIB
            told[f"others_ms_{round_}"] = round(
                sorted([await ask() for _ in range(21)])[10] * 1e3, 1
            )
            came = [await client.came() for client in clients]
            await asyncio.sleep(25)
            later = [await client.came() for client in clients]
            assert all(now > then for (then, _), (now, _) in zip(came, later, strict=True))
            assert all(ended == 0 for _, ended in later)
        began_s = time.monotonic()
        await until(lambda: router.status().in_flight == 0, WAIT_S)
        await until(lambda: all(w.running == 0 for w in router.status().workers), WAIT_S)
        told[f"freed_s_{round_}"] = round(time.monotonic() - began_s, 1)
        for _ in range(20):
            await ask()
        assert _alive() < 50, "of the requests that are over nothing is kept"
        after.append(_kib())
        told[f"kib_left_{round_}"] = after[-1] - before_kib
    log.info("%s", json.dumps(told))
    assert after[1] - after[0] < 0.1 * (after[0] - before_kib) + 20_000, (
        "the second round leaves nothing"
    )

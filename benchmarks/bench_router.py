"""The router's own share of a request: everything but the model.

A chat of 2,000 characters goes to a router in a process of its own, which sends it over the wire to
a mock worker in another that answers at once; a third one asks and holds the clock. Nothing but the
model is made up: tokenizer and template are SmolLM2's, the index is a real Redis.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.worker.settings import ModelSettings
from pie.worker.sources import resolve
from tests.support.mock_worker import MockSpec, MockWorker

ROOT = Path(__file__).parents[1]
CHARS = 2000
WARM_UP = 200
REQUESTS = 2000
CONNECTIONS = 16
ANSWER_TOKENS = 16
ROUNDS = 3


def run() -> dict[str, object]:
    """Return milliseconds at one connection and requests a second at sixteen."""
    cache_folder = ModelSettings().cache_folder.expanduser()
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-"))
    server = EmbeddedServer(folder / "index", persist=False)
    router: subprocess.Popen[str] | None = None
    mock: MockWorker | None = None
    try:
        settings = IndexSettings(url=server.start())
        mock = MockWorker(
            MockSpec(
                place="w0",
                index=settings.model_dump_json(),
                tokenizer=str(resolve("smollm2", cache_folder=cache_folder).path),
                log=str(folder / "log"),
                quiet=True,
            ),
            folder,
        )
        router = _started("router", settings.model_dump_json())
        assert router.stdout is not None
        url = router.stdout.readline().strip()
        results = {
            name: _best([_asked(url, connections, stream=stream) for _ in range(ROUNDS)])
            for name, connections, stream in (
                ("one_connection", 1, False),
                ("one_connection_streaming", 1, True),
                ("sixteen_connections", CONNECTIONS, False),
            )
        }
        return {"prompt_chars": CHARS, "answer_tokens": ANSWER_TOKENS, **results}
    finally:
        if mock is not None:
            mock.kill()
        if router is not None:
            router.terminate()
            router.wait(10)
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.bench_router", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def _asked(url: str, connections: int, *, stream: bool) -> dict[str, float]:
    """Ask from a process of its own."""
    asking = _started("ask", url, str(connections), str(int(stream)))
    output, _ = asking.communicate(timeout=300)
    assert asking.returncode == 0
    result: dict[str, float] = json.loads(output)
    return result


def _best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median round, with the lowest and highest median beside it."""
    rounds = sorted(rounds, key=lambda one: one["p50_ms"])
    middle = rounds[len(rounds) // 2]
    return middle | {"p50_ms_lowest": rounds[0]["p50_ms"], "p50_ms_highest": rounds[-1]["p50_ms"]}


async def _route(index: str) -> None:
    """Run a router and print its address."""
    settings = IndexSettings.model_validate_json(index)
    service = RouterService(RouterSettings(port=0), index_url=settings.url, index=settings)
    await service.start()
    while not service.status().ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    print(service.url, flush=True)
    await asyncio.Event().wait()


async def _ask(url: str, connections: int, stream: bool) -> None:
    """Ask over kept connections, each one request after the other, and print what it took."""
    times_ms: list[float] = []
    began_s = 0.0

    async def client(number: int, requests: int, into: list[float]) -> None:
        host = urlsplit(url)
        reader, writer = await asyncio.open_connection(host.hostname, host.port)
        for turn in range(requests):
            request = _request(f"{number}/{turn}", stream)
            sent_s = time.perf_counter()
            writer.write(request)
            await _answer(reader, stream)
            into.append((time.perf_counter() - sent_s) * 1e3)
        writer.close()

    for requests, into in ((WARM_UP, []), (REQUESTS // connections, times_ms)):
        began_s = time.perf_counter()
        await asyncio.gather(*(client(n, requests, into) for n in range(connections)))
    took_s = time.perf_counter() - began_s
    cuts = statistics.quantiles(times_ms, n=100)
    print(
        json.dumps(
            {
                "p50_ms": round(statistics.median(times_ms), 3),
                "p90_ms": round(cuts[89], 3),
                "p99_ms": round(cuts[98], 3),
                "requests_per_s": round(len(times_ms) / took_s, 1),
            }
        )
    )


def _request(name: str, stream: bool) -> bytes:
    """Return a request whose prompt nobody has asked before."""
    text = (ROOT / "README.md").read_text(errors="replace")
    prompt = (f"{name} {time.time_ns()} " + text * 5)[:CHARS]
    body = json.dumps(
        {
            "model": "mock",
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": ANSWER_TOKENS,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _answer(reader: asyncio.StreamReader, stream: bool) -> None:
    """Read one whole answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert head.startswith(b"http/1.1 200"), head
    if stream:
        await reader.readuntil(b"0\r\n\r\n")
        return
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    await reader.readexactly(length)


if __name__ == "__main__":
    if sys.argv[1] == "router":
        uvloop.run(_route(sys.argv[2]))
    else:
        uvloop.run(_ask(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1"))

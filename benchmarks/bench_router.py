"""The router's own share of a request: everything but the model.

A chat of 2,000 characters goes to a router in a process of its own, which sends it over the wire to
a mock worker in another that answers at once; a third one asks and holds the clock. Nothing but the
model is made up: tokenizer and template are SmolLM2's, the index is a real Redis.

Asked are chats that nobody has asked before, later turns of conversations that began with such a chat,
and completions of as many token ids, which need no tokenising.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import uvloop

from pie.cluster.collector import keep_pauses_short
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.worker.settings import ModelSettings
from pie.worker.sources import resolve
from tests.support.mock_worker import MockSpec, MockWorker

ROOT = Path(__file__).parents[1]
CHARS = 2000
WARM_UP = 100
REQUESTS = 1000
CONNECTIONS = 16
ANSWER_TOKENS = 16
ROUNDS = 3
TURNS = 5
TURN_CHARS = 200
IDS = 450
KINDS = ("fresh", "fresh_streaming", "later_turns", "token_ids")


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
            kind: {
                name: _best(_asked(url, connections, kind))
                for name, connections in (
                    ("one_connection", 1),
                    ("sixteen_connections", CONNECTIONS),
                )
            }
            for kind in KINDS
        }
        return {
            "prompt_chars": CHARS,
            "later_turn_chars": TURN_CHARS,
            "prompt_tokens_of_ids": IDS,
            "answer_tokens": ANSWER_TOKENS,
            **results,
        }
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


def _asked(url: str, connections: int, kind: str) -> list[dict[str, float]]:
    """Ask from a process of its own, several rounds."""
    asking = _started("ask", url, str(connections), kind)
    output, _ = asking.communicate(timeout=300)
    assert asking.returncode == 0
    rounds: list[dict[str, float]] = json.loads(output)
    return rounds


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
    # As the process of a router does.
    keep_pauses_short()
    print(service.url, flush=True)
    await asyncio.Event().wait()


class _Client:
    """One connection that asks one request after the other."""

    def __init__(self, kind: str, number: int) -> None:
        self._kind = kind
        self._number = number
        self._messages: list[dict[str, str]] = []
        self._text = ((ROOT / "README.md").read_text(errors="replace") * 5)[:CHARS]
        self._draw = random.Random(number)
        self.asked = 0

    async def run(self, url: str, requests: int, into: list[float]) -> None:
        """Ask so many requests that count, and note how long each took."""
        host = urlsplit(url)
        reader, writer = await asyncio.open_connection(host.hostname, host.port)
        counted = 0
        while counted < requests:
            request, counts = self._next()
            self.asked += 1
            sent_s = time.perf_counter()
            writer.write(request)
            answer = await self._answer(reader)
            if counts:
                into.append((time.perf_counter() - sent_s) * 1e3)
                counted += 1
            if self._messages:
                content = json.loads(answer)["choices"][0]["message"]["content"]
                self._messages.append({"role": "assistant", "content": content})
        writer.close()

    def _next(self) -> tuple[bytes, bool]:
        """Return a request that nobody has asked before, and whether its time counts."""
        fresh = f"{self._number} {time.time_ns()} {self._text}"
        if self._kind == "token_ids":
            ids = [self._draw.randrange(1_000, 40_000) for _ in range(IDS)]
            return _request("/v1/completions", {"prompt": ids}), True
        if self._kind != "later_turns":
            body = {
                "messages": [{"role": "user", "content": fresh[:CHARS]}],
                "stream": self._kind == "fresh_streaming",
            }
            return _request("/v1/chat/completions", body), True
        begins = len(self._messages) in (0, 2 * TURNS)
        if begins:
            self._messages.clear()
        content = fresh[: CHARS if begins else TURN_CHARS]
        self._messages.append({"role": "user", "content": content})
        return _request("/v1/chat/completions", {"messages": self._messages}), not begins

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        """Read one whole answer."""
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert head.startswith(b"http/1.1 200"), head
        if self._kind == "fresh_streaming":
            return await reader.readuntil(b"0\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return await reader.readexactly(length)


def _request(path: str, body: Mapping[str, object]) -> bytes:
    """Return a request as it goes over the socket."""
    content = json.dumps({"model": "mock", "max_tokens": ANSWER_TOKENS, **body}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\n"
        f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def _ask(url: str, connections: int, kind: str) -> None:
    """Ask over kept connections, each one request after the other, and print what it took."""
    rounds = [await _round(url, connections, kind, REQUESTS) for _ in range(ROUNDS)]
    print(json.dumps(rounds))


async def _round(url: str, connections: int, kind: str, requests: int) -> dict[str, float]:
    """Ask so many requests that count, after some that do not."""
    times_ms: list[float] = []
    began_s = 0.0
    clients: list[_Client] = []
    for asked, into in ((WARM_UP, []), (requests, times_ms)):
        began_s = time.perf_counter()
        clients = [_Client(kind, number) for number in range(connections)]
        await asyncio.gather(*(client.run(url, asked // connections, into) for client in clients))
    took_s = time.perf_counter() - began_s
    cuts = statistics.quantiles(times_ms, n=100)
    return {
        "p50_ms": round(statistics.median(times_ms), 3),
        "p90_ms": round(cuts[89], 3),
        "p99_ms": round(cuts[98], 3),
        # First turns of conversations count here, and not above.
        "requests_per_s": round(sum(one.asked for one in clients) / took_s, 1),
    }


if __name__ == "__main__":
    if sys.argv[1] == "router":
        uvloop.run(_route(sys.argv[2]))
    else:
        uvloop.run(_ask(sys.argv[2], int(sys.argv[3]), sys.argv[4]))

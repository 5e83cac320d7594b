"""A live cluster with mock engines, and a trace through it: what the simulator is held against.

Covers starting it (the real router, a real Redis, the real wire, mock workers that are processes of their
own) and asking it in a closed loop, over HTTP. Does not cover the workers
(`pie.simulator.mock_worker`) or the simulation (`pie.simulator.cluster`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.policies.loader import load_policies
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.mock_worker import MockWorkerSpec
from pie.simulator.report import report_of
from pie.simulator.trace import TraceRequest
from tests.support.chat_folder import write_chat_folder

_ROOT = Path(__file__).parents[1]
_MODEL = "mock"
_START_S = 60.0
_REQUEST_S = 120.0


@dataclass(frozen=True, slots=True)
class Answered:
    """One request of a trace."""

    place: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Rates:
    """What was found of what was asked."""

    hit_rate: float
    """Prompt tokens that were not computed, as a share of all."""
    busiest_over_mean: float
    """The busiest worker's computed tokens over the mean."""


class LiveCluster:
    """A router before mock workers. Make one with `live_cluster`."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    @property
    def url(self) -> str:
        """The router's address."""
        return self._service.url

    async def run_closed(self, trace: Sequence[TraceRequest], *, clients: int) -> list[Answered]:
        """Let so many clients ask one request after the other, in the trace's order."""
        coming = iter(trace)
        answered: list[Answered] = []

        async def ask_on(http: httpx.AsyncClient) -> None:
            for request in coming:
                one = await self._ask(http, request)
                answered.append(one)

        limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
        async with httpx.AsyncClient(base_url=self.url, timeout=_REQUEST_S, limits=limits) as http:
            await asyncio.gather(*(ask_on(http) for _ in range(clients)))
        return answered

    async def _ask(self, http: httpx.AsyncClient, request: TraceRequest) -> Answered:
        body = {
            "model": _MODEL,
            "prompt": request.tokens().tolist(),
            "max_tokens": request.output_tokens,
            "seed": request.answer,
            "ignore_eos": True,
            **({} if request.session is None else {"session_id": request.session}),
        }
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        usage = answer.json()["usage"]
        return Answered(
            answer.headers["x-pie-worker"],
            int(usage["prompt_tokens"]),
            int(usage["prompt_tokens_details"]["cached_tokens"]),
            int(usage["completion_tokens"]),
        )


@asynccontextmanager
async def live_cluster(
    spec: ClusterSpec, policies: str, *, speed: float
) -> AsyncIterator[LiveCluster]:
    """Start a cluster like the one that `spec` says is simulated, without a pool.

    Args:
        spec: How many workers, and what they have.
        policies: Text of a policy file.
        speed: Their seconds in one real second.
    """
    assert not spec.pool_pages, "mock workers use no pool"
    workers: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="pie-live-mock-") as name:
        folder = Path(name)
        server = EmbeddedServer(folder / "index", persist=False)
        service: RouterService | None = None
        try:
            index = IndexSettings(url=await asyncio.to_thread(server.start))
            tokenizer = write_chat_folder(folder / "chat")
            for number in range(spec.workers):
                worker = MockWorkerSpec(
                    place=f"worker-{number}",
                    index=index.model_dump_json(),
                    tokenizer=str(tokenizer),
                    policies=policies,
                    engine=spec.engine,
                    cost=spec.cost,
                    speed=speed,
                    model=_MODEL,
                )
                workers.append(_started(worker, folder))
            service = RouterService(
                RouterSettings(port=0),
                index_url=index.url,
                index=index,
                policies=load_policies(policies, name="policies"),
            )
            await service.start()
            await _usable(service, workers)
            yield LiveCluster(service)
        finally:
            if service is not None:
                await service.close()
            for process in workers:
                process.terminate()
            for process in workers:
                await asyncio.to_thread(process.wait, 30)
            await asyncio.to_thread(server.stop)


def live_rates(
    spec: ClusterSpec, policies: str, trace: Sequence[TraceRequest], *, clients: int, speed: float
) -> Rates:
    """Return what a live cluster makes of a trace in a closed loop."""

    async def run() -> list[Answered]:
        async with live_cluster(spec, policies, speed=speed) as cluster:
            return await cluster.run_closed(trace, clients=clients)

    answered = asyncio.run(run())
    assert len(answered) == len(trace)
    computed: dict[str, int] = {f"worker-{number}": 0 for number in range(spec.workers)}
    for one in answered:
        computed[one.place] += one.prompt_tokens - one.cached_tokens
    prompt = sum(one.prompt_tokens for one in answered)
    return Rates(
        hit_rate=sum(one.cached_tokens for one in answered) / prompt,
        busiest_over_mean=max(computed.values()) * spec.workers / sum(computed.values()),
    )


def simulated_rates(
    spec: ClusterSpec, policies: str, trace: Sequence[TraceRequest], *, clients: int
) -> Rates:
    """Return what the simulator says of the same."""
    cluster = SimulatedCluster(spec, load_policies(policies, name="policies"))
    cluster.run_closed(trace, clients=clients)
    report = report_of("simulated", cluster)
    return Rates(report.hit_rate, report.busiest_over_mean["computed_tokens"])


def _started(worker: MockWorkerSpec, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / f"{worker.place}.json"
    file.write_bytes(msgspec.json.encode(worker))
    return subprocess.Popen(
        [sys.executable, "-m", "pie.simulator.mock_worker", str(file)], cwd=_ROOT
    )


async def _usable(service: RouterService, workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Wait until the router takes requests for all workers."""
    until_s = time.monotonic() + _START_S
    while True:
        status = service.status()
        if status.usable_workers == len(workers) and status.models:
            return
        if any(process.poll() is not None for process in workers):
            raise RuntimeError("a mock worker has ended; what it printed says why")
        if time.monotonic() > until_s:
            raise TimeoutError(f"{status.usable_workers} of {len(workers)} mock workers are usable")
        await asyncio.sleep(0.05)

"""A live cluster of mock engines, and what the simulator says of the same trace."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random

import httpx
import pytest

from benchmarks.live_mock import live_cluster, live_rates, simulated_rates
from pie.simulator.cluster import ClusterSpec
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import EngineSpec
from pie.simulator.trace import TraceRequest, read_trace
from tests.simulator.parts import cluster

pytestmark = pytest.mark.live

PAGE_TOKENS = 16
POLICIES = "worker: {retention: adaptive}\ncluster: {routing: cost}"
TRACE = os.environ.get("PIE_TRACE", "")


def spec(workers: int, pages: int) -> ClusterSpec:
    return ClusterSpec(
        workers=workers,
        engine=EngineSpec(pages=pages, page_tokens=PAGE_TOKENS, max_running=8, step_tokens=256),
        cost=CostModel(prefill_tokens_per_s=4_000.0, decode_step_ms=20.0),
    )


def conversations(count: int, turns: int) -> list[TraceRequest]:
    """Return turns of conversations that take turns at random, all below one system message."""
    random = Random(7)
    said: list[list[tuple[int, int]]] = [[(1, 64)] for _ in range(count)]
    order = [number for number in range(count) for _ in range(turns)]
    random.shuffle(order)
    trace: list[TraceRequest] = []
    for at, number in enumerate(order):
        answer, output = 10_000 + at, random.randint(8, 32)
        said[number].append((100 + at, random.randint(20, 160)))
        trace.append(
            TraceRequest(float(at), tuple(said[number]), output, answer, session=f"s{number}")
        )
        said[number].append((answer, output))
    return trace


def test_one_client_finds_exactly_what_the_simulator_says() -> None:
    trace, of = conversations(12, 6), spec(1, 160)
    simulated = cluster(of, POLICIES)
    simulated.run_closed(trace, clients=1)
    assert sum(worker.engine.table.evicted for worker in simulated.workers) > 100

    async def run() -> list[tuple[int, int, int]]:
        async with live_cluster(of, POLICIES, speed=100.0) as live:
            return [
                (one.prompt_tokens, one.cached_tokens, one.output_tokens)
                for one in await live.run_closed(trace, clients=1)
            ]

    expected = [
        (one.prompt_tokens, one.cached_tokens, one.output_tokens) for one in simulated.outcomes
    ]
    assert asyncio.run(run()) == expected


def test_several_clients_and_workers_find_about_what_the_simulator_says() -> None:
    trace, of = conversations(30, 5), spec(2, 260)
    simulated = simulated_rates(of, POLICIES, trace, clients=4)
    live = live_rates(of, POLICIES, trace, clients=4, speed=20.0)
    # Few requests, whose order is the machine's: by turns they would find a fifth less.
    in_turn = simulated_rates(of, POLICIES.replace("cost", "round-robin"), trace, clients=4)
    assert in_turn.hit_rate < simulated.hit_rate - 0.2
    assert live.hit_rate == pytest.approx(simulated.hit_rate, abs=0.1)


def test_a_mock_worker_stops_for_a_client_that_has_gone() -> None:
    async def run() -> None:
        async with (
            live_cluster(spec(1, 400), POLICIES, speed=1.0) as live,
            httpx.AsyncClient(base_url=live.url, timeout=30) as http,
        ):

            async def running() -> float:
                (worker,) = (await http.get("/status")).json()["workers"]
                # Empty where it was too busy to say.
                return float(worker["gauges"].get("running", -1))

            body = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 5_000, "ignore_eos": True}
            asked = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(running, 1)
            asked.cancel()
            await until(running, 0)

    asyncio.run(run())


async def until(gauge: Callable[[], Awaitable[float]], value: float) -> None:
    async with asyncio.timeout(30):
        while await gauge() != value:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.skipif(not Path(TRACE).is_file(), reason="PIE_TRACE names no trace")
def test_the_conversation_trace_is_hit_alike_live_and_simulated() -> None:
    trace = read_trace(Path(TRACE), limit=3_000).requests
    of = ClusterSpec(workers=4)
    simulated = simulated_rates(of, "cluster: {routing: cost}", trace, clients=8)
    live = live_rates(of, "cluster: {routing: cost}", trace, clients=8, speed=40.0)
    assert live.hit_rate == pytest.approx(simulated.hit_rate, abs=0.01)

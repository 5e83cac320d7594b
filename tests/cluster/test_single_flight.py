"""A burst with one new prefix over real workers, a real pool and a real router: it is computed once."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from pie.index.contract import PlaceRecord
from pie.index.settings import IndexSettings
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.policies.routing import RoutingPolicy
from pie.policies.routing_plain import RoundRobinRouting
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.conftest import tokenizer_folder
from tests.worker.engine.places import PAGE, Places, model_folder, until, worker_settings

__all__ = ["index_settings", "redis_server", "redis_url", "tokenizer_folder"]

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PREFIX = [3 + token * 7 % 200 for token in range(55 * PAGE)]
TAIL = 4
BURST = 8


class Burst:
    """Two workers behind a router that sends to them in turn."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.router: RouterService

    async def start(self, *, in_processes: bool) -> None:
        await self.places.pool()
        if in_processes:
            await self._start_processes()
        else:
            for name in ("w0", "w1"):
                await self.places.worker(name, attention="torch")
        factory = cast(type[RoutingPolicy], RoundRobinRouting)
        self.router = RouterService(
            RouterSettings(port=0),
            index_url=self.places.index.url,
            index=self.places.index,
            policies=PolicySet(routing=PolicySpec("round-robin", factory)),
        )
        await self.router.start()
        await until(
            lambda: self.router.status().usable_workers == 2 and bool(self.router.status().models)
        )

    async def _start_processes(self) -> None:
        for name in ("w0", "w1"):
            self.processes[name] = subprocess.Popen(  # noqa: ASYNC220 – it returns at once
                [
                    *(sys.executable, "-m", "tests.worker.engine.worker_process"),
                    *(name, f"ipc://{self.places.sockets}/{name}"),
                    worker_settings(self.places.folder, attention="torch").model_dump_json(),
                    self.places.index.model_dump_json(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
        for process in self.processes.values():
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            msgspec.json.decode(line, type=PlaceRecord)

    async def close(self) -> None:
        await self.router.close()
        for process in self.processes.values():
            process.kill()
            process.communicate()

    async def ask(self, http: httpx.AsyncClient, number: int) -> dict[str, Any]:
        """Ask for a short answer to the prefix and a tail of its own."""
        body = {
            "model": self.router.status().models[0],
            "prompt": [*PREFIX, *(10 + number for _ in range(TAIL))],
            "max_tokens": 4,
            "temperature": 0,
        }
        answer = await http.post(f"{self.router.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return {**answer.json(), "worker": answer.headers["x-pie-worker"]}

    async def counts(self, http: httpx.AsyncClient) -> dict[str, dict[str, float]]:
        """Return what each worker counts, by its name."""
        status = (await http.get(f"{self.router.url}/status")).json()
        return {line["place"]: {**line["counters"], **line["gauges"]} for line in status["workers"]}


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.soak)])
async def burst(
    index_settings: IndexSettings,
    tmp_path: Path,
    tokenizer_folder: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Burst]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder))
    await places.start()
    burst = Burst(places)
    await burst.start(in_processes=request.param)
    yield burst
    await burst.close()
    await places.close()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=120) as http:
        yield http


def _texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["text"] for answer in answers]


async def test_a_prefix_that_a_burst_brings_is_computed_once(
    burst: Burst, http: httpx.AsyncClient
) -> None:
    answers = await asyncio.gather(*(burst.ask(http, number) for number in range(BURST)))
    assert {answer["worker"] for answer in answers} == {"w0", "w1"}
    counts: dict[str, dict[str, float]] = {}

    async def all_told() -> None:
        nonlocal counts
        while sum(one.get("finished", 0) for one in counts.values()) < BURST:
            await asyncio.sleep(0.2)
            counts = await burst.counts(http)

    await asyncio.wait_for(all_told(), 120)
    computed = sum(one["prefill_tokens"] for one in counts.values())
    assert sorted(one["awaited"] for one in counts.values()) == [0, BURST // 2]
    assert computed <= len(PREFIX) + BURST * (TAIL + PAGE), "one prefix, and every tail"
    told = [
        (await http.get(f"{burst.router.url}/admin/requests/{answer['id']}")).json()
        for answer in answers
    ]
    awaited = [one["sequences"][0]["attempts"][0]["awaited_tokens"] for one in told]
    assert sorted(awaited) == [0] * (BURST // 2) + [len(PREFIX)] * (BURST // 2)
    again = [await burst.ask(http, number) for number in range(BURST)]
    assert _texts(again) == _texts(answers), "the same answers one after the other"


@pytest.mark.soak
@pytest.mark.parametrize("burst", [True], indirect=True)
async def test_where_the_one_that_computes_it_is_killed_the_others_answer(
    burst: Burst, http: httpx.AsyncClient
) -> None:
    # It takes the first request and computes nothing of it.
    burst.processes["w0"].send_signal(signal.SIGSTOP)
    asked = [asyncio.create_task(burst.ask(http, number)) for number in range(4)]
    elsewhere = [asked[1], asked[3]]
    answers = await asyncio.gather(*elsewhere)
    assert [answer["worker"] for answer in answers] == ["w1", "w1"]
    counts = (await burst.counts(http))["w1"]
    assert counts["awaited_in_vain"] >= 1
    assert counts["prefill_tokens"] >= len(PREFIX), "computed after all"
    burst.processes["w0"].kill()
    rest = await asyncio.gather(asked[0], asked[2])
    assert [answer["worker"] for answer in rest] == ["w1", "w1"]
    again = [await burst.ask(http, number) for number in range(4)]
    assert _texts(again) == _texts([rest[0], answers[0], rest[1], answers[1]])

"""What all routers have counted is told by any of them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from pie.index.errors import IndexNotAskedError
from pie.index.tallies import Tallies, Tally
from pie.router import sums
from pie.router.status import ClusterStatus, RouterLine, WorkerLine
from pie.router.sums import Sums, added
from tests.router.conftest import WAIT_S, Cluster

STATUS = ClusterStatus(
    model="m",
    index="ok",
    workers=[WorkerLine(place="w0", address="", pages={}, state="ready", running=2)],
    pool=[],
    routers=[RouterLine(router="own", in_flight=1, requests=3)],
    in_flight=1,
    requests=3,
    prompt_tokens=100,
    cached_tokens={"device": 7},
)


def test_counts_of_all_routers_are_added_up_and_each_is_named() -> None:
    others = [
        Tally(
            "z",
            {"w0": 1},
            requests=4,
            cached_tokens={"pool": 5},
            policy_version=2,
            policy_failures=6,
        ),
        Tally("b", {"gone": 9}, in_flight=6, prompt_tokens=50, cached_tokens={"device": 1}),
        Tally("later"),
    ]
    told = added(STATUS, others)
    assert (told.requests, told.in_flight, told.prompt_tokens) == (7, 7, 150)
    assert told.cached_tokens == {"device": 8, "pool": 5}
    assert told.policy_failures == 6
    assert [one.running for one in told.workers] == [3]
    assert [one.router for one in told.routers] == ["own", "b", "later", "z"]
    assert [one.policy_version for one in told.routers] == [0, 0, 0, 2]


async def test_while_redis_does_not_tell_the_counts_are_one_routers_alone() -> None:
    class Away(Tallies):
        def __init__(self) -> None:
            pass

        async def others(self) -> list[Tally]:
            raise IndexNotAskedError("Redis: away")

    told = await Sums(Away()).whole(STATUS)
    assert (told.requests, told.routers, told.routers_together) == (3, STATUS.routers, "degraded")


async def test_others_are_asked_once_for_all_who_look_within_a_second() -> None:
    class Asked(Tallies):
        def __init__(self) -> None:
            self.times = 0

        async def others(self) -> list[Tally]:
            self.times += 1
            await asyncio.sleep(0)
            return [Tally("b", requests=self.times)]

    tallies, now_s = Asked(), 0.0
    adds = Sums(tallies, clock=lambda: now_s)
    seen = await asyncio.gather(*(adds.whole(STATUS) for _ in range(5)))
    assert [one.requests for one in seen] == [4] * 5
    now_s = 0.9
    assert (await adds.whole(STATUS)).requests == 4
    now_s = 1.0
    assert (await adds.whole(STATUS)).requests == 5
    assert tallies.times == 2


@pytest.mark.live
async def test_any_router_tells_what_all_have_counted(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "_EVERY_S", 0.05)
    cluster.mock("w0")
    routers = [await cluster.router(1) for _ in range(2)]
    for router, asks in zip(routers, (1, 2), strict=True):
        for _ in range(asks):
            asked = {"model": "mock", "prompt": "How many are we?" * 8, "max_tokens": 2}
            answer = await http.post(f"{router.url}/v1/completions", json=asked)
            assert answer.status_code == 200

    async def until_told(requests: int, count: int) -> Any:
        async with asyncio.timeout(WAIT_S):
            while True:
                told = (await http.get(f"{routers[0].url}/status")).json()
                if (told["requests"], len(told["routers"])) == (requests, count):
                    return told
                await asyncio.sleep(0.05)

    told = await until_told(3, 2)
    assert [(one["router"], one["requests"]) for one in told["routers"]] == [
        (routers[0].name, 1),
        (routers[1].name, 2),
    ]
    assert told["prompt_tokens"] == sum(one.status().prompt_tokens for one in routers)
    assert told["output_tokens"] == 6
    assert sum(told["cached_tokens"].values()) > 0
    # Its metrics are one router's: who scrapes all adds them up.
    metrics = (await http.get(f"{routers[0].url}/metrics")).text
    assert 'pie_router_requests_total{path="/v1/completions",status="200"} 1.0' in metrics
    await routers[1].close()
    await until_told(1, 1)

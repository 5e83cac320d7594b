"""Failures of a routing policy are told as events, each reason now and then, by every router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx
import pytest

from pie.policies.routing import Choice, RequestView, WorkerView
from pie.router import conductor, failures
from pie.router.failures import RoutingFailures
from tests.router.conftest import WAIT_S, Cluster

ONCE = "once the built-in `cost` chose in its place: "


def told(failing: RoutingFailures, now_s: float) -> list[str]:
    return [one.reason for one in failing.take("r", now_s)]


def test_a_reason_is_told_at_once_and_then_once_a_minute_with_how_often() -> None:
    failing = RoutingFailures("my:Policy")
    failing.note("it raised")
    (event,) = failing.take("router at a", 0.0)
    assert (event.policy, event.action, event.place) == ("my:Policy", "fail", "router at a")
    assert event.reason == f"{ONCE}it raised"
    for _ in range(3):
        failing.note("it raised")
    failing.note("it was late")
    assert told(failing, 1.0) == [f"{ONCE}it was late"]
    assert told(failing, 59.0) == []
    assert told(failing, 60.0) == ["3 times the built-in `cost` chose in its place: it raised"]
    assert told(failing, 600.0) == []


def test_another_policy_of_the_same_reason_is_told_by_its_own_name() -> None:
    failing = RoutingFailures("one")
    failing.note("it raised")
    assert failing.count == 1
    failing.begin("two")
    assert not failing.count, "it has not failed yet"
    failing.note("it raised")
    assert [one.policy for one in failing.take("r", 0.0)] == ["one", "two"]


def test_what_gives_another_reason_each_time_is_told_in_so_many_lines() -> None:
    failing = RoutingFailures("p")
    found: list[str] = []
    for second in range(59):
        for number in range(100):
            failing.note(f"reason {second} {number}")
        found += told(failing, float(second))
    assert len(found) == failures._MOST_REASONS + 1
    assert found[-1] == "84 times the built-in `cost` chose in its place: other reasons"
    assert told(failing, 60.0) == [
        "5800 times the built-in `cost` chose in its place: other reasons"
    ]


class Raises:
    """A policy that always fails."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        raise ValueError(request)


@pytest.mark.live
async def test_every_router_tells_what_its_own_policy_did(
    cluster: Cluster, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conductor, "_EVERY_S", 0.05)
    cluster.mock("w0")
    routers = [await cluster.router(1, routing=Raises()) for _ in range(2)]
    for router in routers:
        asked = {"model": "mock", "prompt": "Where?", "max_tokens": 2}
        answer = await http.post(f"{router.url}/v1/completions", json=asked)
        assert answer.status_code == 200, "the built-in one chose"
        name = answer.headers["x-pie-request-id"]
        record = (await http.get(f"{router.url}/admin/requests/{name}")).json()
        (attempt,) = record["sequences"][0]["attempts"]
        assert attempt["policy"] == "of this test"
        assert attempt["policy_failure"].startswith("ValueError at ")
        assert "Where?" not in attempt["policy_failure"]
    found: dict[str, dict[str, object]] = {}
    async with asyncio.timeout(WAIT_S):
        while len(found) < 2:
            await asyncio.sleep(0.05)
            events = (await http.get(f"{routers[0].url}/admin/policies/events")).json()["events"]
            found = {one["place"]: one for one in events if one["action"] == "fail"}
    assert found.keys() == {router.name for router in routers}
    for one in found.values():
        assert one["policy"] == "of this test"
        assert str(one["reason"]).startswith(f"{ONCE}ValueError at ")
        assert "Where?" not in str(one["reason"])
    metrics = (await http.get(f"{routers[0].url}/metrics")).text
    assert "pie_router_policy_version 0.0" in metrics
    assert "pie_router_policy_refused 0.0" in metrics

"""`/admin/policies`: policies looked at and applied through a router."""

from __future__ import annotations

import asyncio

import httpx

from pie.policies.routing_plain import RoundRobinRouting
from tests.router.conftest import Cluster

GOOD = "cluster: {routing: round-robin}"


async def test_a_version_is_applied_and_the_router_runs_it(cluster: Cluster) -> None:
    router = await cluster.router(0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        before = (await client.get("/admin/policies")).json()
        assert (before["version"], before["versions"], before["own"]) == (0, [], None)
        applied = await client.post("/admin/policies", json={"text": GOOD, "note": "a test"})
        assert applied.json() == {"version": 1}
        async with asyncio.timeout(10):
            while True:
                report = (await client.get("/admin/policies")).json()
                if [one["version"] for one in report["places"]] == [1]:
                    break
                await asyncio.sleep(0.05)
        assert (await client.get("/status")).json()["policy_version"] == 1
        assert [(one["text"], one["note"]) for one in report["versions"]] == [(GOOD, "a test")]
    assert isinstance(router._chooser._policy, RoundRobinRouting)


async def test_what_is_not_acceptable_is_told_and_changes_nothing(cluster: Cluster) -> None:
    router = await cluster.router(0)
    async with httpx.AsyncClient(base_url=router.url) as client:
        for body, said in (
            ({"text": "worker: {retention: lruu}\ncluster: 3"}, "lruu"),
            ({"text": 7}, "body:"),
            ({}, "body:"),
            ({"text": GOOD, "more": 1}, "body:"),
        ):
            answer = await client.post("/admin/policies", json=body)
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]
        answer = await client.post("/admin/policies", content=b'{"text": null}')
        assert answer.status_code == 415
        assert (await client.get("/admin/policies")).json()["version"] == 0

"""Conversations that go from one worker to another with their pages, seen through the API alone.

Worker processes, a pool node, a router and a real index.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import pytest_asyncio

from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from pie.page.key import page_keys
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from tests.house.tree import ROOT
from tests.support.redis_server import redis_server
from tests.worker.engine.driver import byte_tokenizer
from tests.worker.engine.places import PAGE, Places, model_folder, worker_settings

__all__ = ["redis_server"]

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.xdist_group("moving"),
]

WORKERS = ("w0", "w1")
WAIT_S = 90.0
TURN = list(range(20, 20 + 6 * PAGE))
PAGES = len(TURN) // PAGE


class Running:
    """Two workers and a router before them."""

    def __init__(self, places: Places, http: httpx.AsyncClient) -> None:
        self.places = places
        self.http = http
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        self.processes[name] = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.worker.engine.worker_process"),
                name,
                f"ipc://{self.places.sockets}/{name}-{time.monotonic_ns()}",
                worker_settings(
                    self.places.folder, attention="torch", max_running=1
                ).model_dump_json(),
                self.places.index.model_dump_json(),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.communicate()

    async def apply(self, migration: str) -> None:
        """Put policies in force, and wait until all run them."""
        text = f"cluster: {{migration: [{migration}]}}"
        applied = await self.http.post("/admin/policies", json={"text": text})
        assert applied.is_success, applied.text

        async def everywhere() -> bool:
            places = (await self.http.get("/admin/policies")).json()["places"]
            versions = [one["version"] for one in places if one["place"] in WORKERS]
            return versions == [applied.json()["version"]] * len(self.processes)

        await until(everywhere)

    async def ask(self, tokens: list[int], **fields: Any) -> tuple[int, str]:
        """Ask, and return how many tokens were not computed, and which worker answered."""
        place = fields.pop("place", None)
        headers = {"x-pie-place": place} if place else {}
        body = {"model": "llama", "prompt": tokens, "max_tokens": 1, "temperature": 0, **fields}
        answer = await self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.is_success, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, answer.headers["x-pie-worker"]

    @asynccontextmanager
    async def kept_busy(self, place: str) -> AsyncIterator[None]:
        """Let a worker answer long requests, one after another, so that what comes later waits there."""
        long = [
            asyncio.create_task(
                self.ask([9 + at, 8, 7], max_tokens=240, ignore_eos=True, place=place)
            )
            for at in range(40)
        ]
        try:

            async def is_busy() -> bool:
                return int((await self.worker(place))["waiting"]) >= len(long) // 2

            await until(is_busy)
            yield
            assert not long[-1].done(), "it was not busy any more"
        finally:
            for one in long:
                one.cancel()
            await asyncio.gather(*long, return_exceptions=True)

    async def worker(self, place: str) -> dict[str, Any]:
        """Return what the router's status says of a worker."""
        status = (await self.http.get("/status")).json()
        return next(one for one in status["workers"] if one["place"] == place)

    async def counted(self, place: str, name: str) -> int:
        """Return what a worker has counted."""
        return int((await self.worker(place))["counters"][name])

    async def has_counted(self, place: str, name: str, least: int) -> bool:
        return await self.counted(place, name) >= least

    async def events(self) -> list[dict[str, Any]]:
        """Return what cluster policies did, the oldest first."""
        found = (await self.http.get("/admin/policies/events")).json()["events"]
        return list(reversed(found))

    async def did(self, policy: str, action: str, place: str) -> bool:
        return any(
            (one["policy"], one["action"], one["place"]) == (policy, action, place)
            for one in await self.events()
        )


async def until(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not await condition():
        assert time.monotonic() < end_s, "it did not become so in time"
        await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    redis_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    base = tmp_path_factory.mktemp("moving")
    folder = byte_tokenizer(base / "tokenizer").folder
    index = IndexSettings(
        url=redis_server.url, key_prefix="moving", poll_s=0.05, request_timeout_s=20.0
    )
    places = Places(index, model_folder(base, folder))
    await places.start()
    await places.pool()
    router = RouterService(
        RouterSettings(port=0, allow_place_header=True), index_url=index.url, index=index
    )
    await router.start()
    async with httpx.AsyncClient(base_url=router.url, timeout=WAIT_S) as http:
        one = Running(places, http)
        for name in WORKERS:
            one.start(name)
        try:

            async def ready() -> bool:
                status = router.status()
                return status.usable_workers == len(WORKERS) and bool(status.models)

            await until(ready)
            yield one
        finally:
            for name in list(one.processes):
                one.kill(name)
            await router.close()
            await places.close()


async def test_an_idle_conversation_leaves_a_full_worker_with_its_pages(running: Running) -> None:
    texts = [[40 + 9 * at + one % 7 for one in range(6 * PAGE)] for at in range(3)]
    for at, text in enumerate(texts):
        await running.ask(text, session_id=f"conversation {at}", place="w0")
    await running.apply(
        "{policy: rebalance, full: 0.05, difference: 0.01, idle: 100ms, sessions: 1}"
    )

    async def is_over() -> bool:
        done = [
            (one["place"], "let go" in one["reason"])
            for one in await running.events()
            if (one["policy"], one["action"]) == ("rebalance", "done")
        ]
        return {("w0", True), ("w1", False)} <= set(done)

    await until(is_over)
    found = [one for one in await running.events() if one["policy"] == "rebalance"]
    actions = [one["action"] for one in found if one["action"] in {"move", "fetch", "let-go"}]
    assert actions[0] == "move"
    assert {"fetch", "let-go"} <= set(actions)
    cached, place = await running.ask([*texts[0], 1, 2, 3], session_id="conversation 0")
    assert (cached, place) == (len(texts[0]), "w1"), "it was idle for longest"


async def test_a_hot_prompt_is_brought_near_the_other_worker_and_what_is_expired_leaves(
    running: Running,
) -> None:
    hot = [200 + one % 11 for one in range(6 * PAGE)]
    await running.apply("")
    await running.http.post(
        "/admin/policies",
        json={
            "text": "cluster: {replication: {policy: replicate-hot, uses: 99, workers: 2, worker_uses: 0.2}}"
        },
    )
    await running.ask(hot, session_id="hot", place="w0")

    async def is_near() -> bool:
        await running.ask(hot, session_id="hot", place="w0")
        return await running.did("replicate-hot", "done", "w1")

    await until(is_near)
    assert (await running.ask([*hot, 1], place="w1"))[0] == len(hot)
    await running.apply("{policy: expire, after: 1s}")

    mirror = running.places.mirror
    root = mirror.places()[PlaceId("w0")].model_root
    assert root is not None
    keys = page_keys(root, hot, PAGE)

    async def is_gone() -> bool:
        return not mirror.matches(keys)

    await until(is_gone)
    for place in ("w0", "w1", "pool-0"):
        assert await running.did("expire", "let-go", place)
    await running.apply("")
    assert (await running.ask([*hot, 2, 3], place="w0"))[0] == 0


async def test_a_conversation_that_moved_is_answered_warm_by_pages_that_followed_it(
    running: Running,
) -> None:
    await running.apply(
        "follow-session, {policy: prefetch, requests: 0}, {policy: spill-to-pool, as_made: false}"
    )
    text = [150 + one % 13 for one in range(6 * PAGE)]
    assert await running.ask(text, session_id="moves", place="w0") == (0, "w0")
    from_host = await running.counted("w1", "cached_tokens_host")
    async with running.kept_busy("w1"):
        turn = asyncio.create_task(running.ask([*text, 4, 5], session_id="moves", place="w1"))

        async def has_followed() -> bool:
            return await running.did("follow-session", "done", "w1")

        await until(has_followed)
        assert await running.did("follow-session", "done", "w0")
        assert not turn.done(), "its turn had not come"
    assert await turn == (len(text), "w1")
    # A worker's figures come a moment after its answers.
    await until(lambda: running.has_counted("w1", "cached_tokens_host", from_host + len(text)))


async def test_what_a_waiting_request_needs_is_fetched_before_its_turn(running: Running) -> None:
    await running.apply("{policy: prefetch, requests: 64}")
    text = [170 + one % 17 for one in range(6 * PAGE)]
    stored = await running.counted("w0", "pages_stored")
    assert await running.ask(text, place="w0") == (0, "w0")
    await until(lambda: running.has_counted("w0", "pages_stored", stored + PAGES))
    before = await running.counted("w1", "pages_prefetched")
    from_host = await running.counted("w1", "cached_tokens_host")
    async with running.kept_busy("w1"):
        waiting = asyncio.create_task(running.ask([*text, 4, 5], place="w1"))
        await until(lambda: running.has_counted("w1", "pages_prefetched", before + PAGES))
        assert not waiting.done(), "its turn had not come"
    assert await waiting == (len(text), "w1")
    # A worker's figures come a moment after its answers.
    await until(lambda: running.has_counted("w1", "cached_tokens_host", from_host + len(text)))


async def test_a_drained_workers_conversation_goes_on_warm_at_the_next_one(
    running: Running,
) -> None:
    await running.apply("{policy: spill-to-pool, as_made: false}")
    cached, first = await running.ask(TURN, session_id="ada")
    assert cached == 0
    other = next(name for name in WORKERS if name != first)
    drained = await running.http.post(f"/admin/workers/{first}/drain", json={"timeout_s": 60})
    told = drained.json()
    assert (told["worker"], told["left"]) == (first, 0)
    assert told["moved"] >= PAGES, "what else only it has goes too"

    async def is_moved() -> bool:
        return await running.did("drain", "move", other) and await running.did(
            "drain", "done", other
        )

    await until(is_moved)
    running.kill(first)
    cached, then = await running.ask([*TURN, 3, 4, 5], session_id="ada")
    assert (cached, then) == (len(TURN), other)
    missing = await running.http.post("/admin/workers/w9/drain", json={})
    assert missing.status_code == 404
    said = missing.json()["error"]["message"]
    assert "There is no worker w9" in said
    assert other in said
    metrics = (await running.http.get("/metrics")).text
    assert 'pie_router_cluster_policy_events_total{action="move",policy="drain"}' in metrics

"""A worker that was drained, or is, takes requests again: on the wire, and through a router and the command."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from pie.cluster.errors import ConfigError, NotRunningError
from pie.cluster.policy_edit import Desk
from pie.cluster.worker_drain import drain_worker, take_again
from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.wire.errors import RefusedError
from pie.wire.ids import new_request_id
from pie.wire.messages import RefusalCode
from pie.wire.place_orders import Drained, DrainNode, TakeAgain, TakesAgain
from pie.worker.leaving import Emptying
from pie.worker.service import WorkerService
from tests.worker.engine.asking import Asker
from tests.worker.engine.places import Brake, Places, model_folder, until

PROMPT = [5, 6, 7]


@pytest.fixture
async def places(
    index_settings: IndexSettings, tmp_path: Path, tokenizer_folder: Path
) -> AsyncIterator[Places]:
    places = Places(index_settings, model_folder(tmp_path, tokenizer_folder))
    await places.start()
    yield places
    await places.close()


async def undo(asker: Asker) -> None:
    ask = TakeAgain(new_request_id(), asker.client.epoch)
    answer, _ = await asker.client.request(ask, timeout_s=120)
    assert isinstance(answer, TakesAgain)


async def drain(asker: Asker, timeout_s: float = 60) -> Drained:
    ask = DrainNode(new_request_id(), asker.client.epoch, timeout_s)
    answer, _ = await asker.client.request(ask, timeout_s=120)
    assert isinstance(answer, Drained)
    return answer


async def assert_taken(places: Places, worker: WorkerService, asker: Asker) -> None:
    answer = await asker.ask(PROMPT, 2)
    assert answer.refused is None
    assert len(answer.token_ids) == 2
    await until(lambda: not places.mirror.places()[worker.record.place].draining)


async def test_a_worker_that_was_drained_takes_requests_again_and_may_be_drained_anew(
    places: Places,
) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker = await places.asker(worker)
    for _ in range(2):
        await drain(asker)
        refused = (await asker.ask(PROMPT, 2)).refused
        assert refused is not None
        assert refused.code is RefusalCode.DRAINING
        await until(lambda: places.mirror.places()[worker.record.place].draining)
        await undo(asker)
        assert worker.status().state == "serving"
        await assert_taken(places, worker, asker)


async def test_a_drain_under_way_ends_when_it_is_undone_and_who_asked_for_it_is_told(
    places: Places,
) -> None:
    await places.pool()
    worker = await places.worker("w0", attention="torch")
    asker, other = await places.asker(worker), await places.asker(worker)
    brake = Brake(worker, pause_s=0.05)
    _, running = await asker.send(PROMPT, 100, ignore_eos=True)
    await asker.until_told(lambda: running.deltas > 1)
    draining = asyncio.create_task(drain(other, 90))
    await until(lambda: worker.status().state == "draining")
    await undo(asker)
    with pytest.raises(RefusedError, match="it was told meanwhile to take requests again"):
        await draining
    brake.pause_s = 0.0
    await assert_taken(places, worker, asker)
    await asker.ended(running)
    assert len(running.token_ids) == 100


async def test_a_worker_that_serves_has_nothing_to_undo_and_one_that_stops_does_not(
    places: Places,
) -> None:
    worker = await places.worker("w0", pool=False, attention="torch")
    asker = await places.asker(worker)
    await undo(asker)
    await assert_taken(places, worker, asker)
    await worker.drain(10)
    with pytest.raises(RefusedError, match="the worker is stopping"):
        await undo(asker)
    assert worker.status().state == "draining"


async def test_a_drain_is_undone_through_a_router_and_its_status_shows_it(places: Places) -> None:
    worker = await places.worker("w0", pool=False, attention="torch")
    router = RouterService(RouterSettings(port=0), index_url=places.index.url, index=places.index)
    await router.start()
    desk, said = Desk(router.url, ""), list[str]()
    try:
        async with httpx.AsyncClient(base_url=router.url) as client:

            async def become(state: str, usable: int) -> None:
                await until(lambda: router.status().usable_workers == usable)
                (told,) = (await client.get("/status")).json()["workers"]
                assert told["state"] == state

            await become("ready", 1)
            assert await asyncio.to_thread(drain_worker, desk, "w0", 10.0, said.append) == 0
            await become("draining", 0)
            why = "All workers for llama are draining (w0): they take no requests."
            assert router.status().reason == why
            for answer in (
                await client.get("/ready"),
                await client.post("/v1/completions", json={"model": "llama", "prompt": "a"}),
            ):
                assert answer.status_code == 503
                assert answer.json()["error"]["message"] == why
                assert int(answer.headers["retry-after"]) >= 1
            assert "`pie drain w0 --undo`" in said[-1]
            assert await asyncio.to_thread(take_again, desk, "w0", said.append) == 0
            assert said[-1] == "w0 takes requests"
            await become("ready", 1)
            with pytest.raises(ConfigError, match="There is no worker w9; those that are up: w0"):
                await asyncio.to_thread(take_again, desk, "w9", said.append)
            await worker.drain(10)
            with pytest.raises(NotRunningError, match="w0: the worker is stopping"):
                await asyncio.to_thread(take_again, desk, "w0", said.append)
            answer = await client.delete("/admin/workers/w0/drain")
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "worker_refused")
    finally:
        await router.close()


async def test_a_leave_that_failed_is_tried_again() -> None:
    emptying = Emptying()
    outcomes: list[OSError | tuple[int, int]] = [OSError("no"), (3, 4)]

    async def leave() -> tuple[int, int]:
        outcome = outcomes.pop(0)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    with pytest.raises(OSError, match="no"):
        await emptying.join(leave)
    for _ in range(2):
        assert await emptying.join(leave) == (3, 4)

"""How often and for how long a sequence that lost its worker is tried elsewhere."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId
from pie.policies.routing import Choice, RequestView, WorkerView
from pie.router.generation import Ending, Order
from pie.router.link import WorkerLink
from pie.router.models import ServedModel
from pie.router.prefix import Prefix
from pie.router.prompt import Prompt
from pie.router.settings import RouterSettings
from pie.router.tries import Tries
from pie.wire.messages import RefusalCode, Refused, Sampling
from tests.router.conftest import WAIT_S, Cluster, until
from tests.router.test_trouble import streamed
from tests.support.mock_worker import REPLY

live = pytest.mark.live
DELAY_S = 0.01
IDS = array("I", [1])


def link(place: str) -> WorkerLink:
    return WorkerLink(cast(PlaceRecord, SimpleNamespace(place=place)))


def tries(**settings: Any) -> Tries:
    model = cast(ServedModel, SimpleNamespace(name="m"))
    order = Order(model, Prompt(IDS), Prefix(IDS), 9, Sampling())
    return Tries(order, RouterSettings(**settings))


FULL = Refused("r", RefusalCode.OVERLOADED, "full", 1.0)


@live
async def test_a_long_answer_outlives_more_workers_than_there_are_attempts(
    cluster: Cluster,
) -> None:
    dying = [cluster.mock(f"w{at}", token_delay_s=DELAY_S, die_after_tokens=8) for at in range(3)]
    router = await cluster.router(3, worker_wait_s=3 * WAIT_S, attempts=2)
    answer = asyncio.ensure_future(streamed(cluster.openai(router, timeout=90)))
    await until(lambda: all(mock.events("generate") for mock in dying))
    cluster.mock("last")
    assert (await answer)[0] == REPLY
    assert router.metrics.total(router.metrics.resumes) == 3


@live
async def test_half_an_answer_waits_for_room_and_asks_full_workers_again(cluster: Cluster) -> None:
    dying = cluster.mock("w0", token_delay_s=0.05, die_after_tokens=10)
    router = await cluster.router(1, worker_wait_s=3 * WAIT_S, retry_after_s=0.1)
    answer = asyncio.ensure_future(streamed(cluster.openai(router, timeout=90)))
    await until(lambda: bool(dying.events("generate")))
    full = [cluster.mock(f"f{at}", refuse="overloaded") for at in range(2)]
    await until(lambda: sum(len(mock.events("generate")) for mock in full) > 6)
    cluster.mock("w1")
    assert (await answer)[0] == REPLY


class InOrder:
    """Takes the first of these places that is a candidate."""

    def __init__(self, *places: str) -> None:
        self._places = places

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        there = {worker.place for worker in workers}
        return Choice(PlaceId(next(place for place in self._places if place in there)))


@live
async def test_an_answer_goes_on_at_its_own_model_and_only_without_one_at_another(
    cluster: Cluster,
) -> None:
    for place in ("w0", "w1"):
        cluster.mock(place, weights="old", token_delay_s=DELAY_S, die_after_tokens=8)
    new = cluster.mock("w2", weights="new")
    router = await cluster.router(3, routing=InOrder("w0", "w2", "w1"))
    assert (await streamed(cluster.openai(router, timeout=60)))[0] == REPLY
    [first], [second] = (mock.events("generate") for mock in cluster.mocks[:2])
    [last] = new.events("generate")
    places = [cast(float, one["at"]) for one in (first, second, last)]
    assert places == sorted(places)
    assert router.metrics.total(router.metrics.other_models) == 1


def test_not_all_workers_are_said_to_be_busy_where_some_were_not_asked() -> None:
    one = tries(attempts=1)
    one.ended(link("w0"), Ending.REFUSED, "overloaded", tokens=0, refused=FULL)
    assert not one.may_go_on()
    assert "1 of them" in one.gave_up(others=1, nobody="").message
    assert one.gave_up(others=0, nobody="").message.startswith("All workers are busy")


def test_a_token_gives_all_attempts_back_and_only_what_came_after_it_counts() -> None:
    one, failing = tries(attempts=2), link("w0")
    one.ended(failing, Ending.FAILED, "failed", tokens=0, failure="broken")
    one.ended(link("w1"), Ending.GONE, "gone", tokens=3)
    assert one.may_go_on()
    assert not one.leaves_out(failing)
    one.ended(link("w2"), Ending.SILENT, "silent", tokens=0)
    assert not one.may_go_on()
    told = one.gave_up(others=0, nobody="").message
    assert told.startswith("2 workers in a row brought no token")
    assert "w2, was lost (silent)" in told


def test_a_full_worker_costs_time_and_no_attempt_once_there_are_tokens() -> None:
    one, full = tries(attempts=2, worker_wait_s=10, retry_after_s=2), link("f0")
    one.ended(link("w0"), Ending.GONE, "gone", tokens=1)
    assert one.waits(100.0)
    for now_s in (101.0, 102.0, 104.0, 106.0):
        one.ended(full, Ending.REFUSED, "overloaded", tokens=0, refused=FULL)
        assert one.leaves_out(full)
        assert one.waits(now_s)
        assert one.leaves_out(full) is (now_s == 101.0)
    assert one.may_go_on()
    one.ended(full, Ending.REFUSED, "overloaded", tokens=0, refused=FULL)
    assert not one.waits(110.0)
    assert one.gave_up(others=0, nobody="").message.startswith(
        "For 10 s (router.worker_wait_s) all workers"
    )

"""Orders about pages over the wire: real workers, a real pool node, a real index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pie.index.settings import IndexSettings
from pie.page.key import PageKey, page_keys
from pie.policies.loader import load_policies
from pie.policies.order_limits import MOST_PAGES
from pie.pool.pace import Pace
from pie.wire.errors import RefusedError
from pie.wire.ids import new_request_id
from pie.wire.messages import Message, RefusalCode
from pie.wire.place_orders import (
    BringNear,
    Drained,
    DrainNode,
    LetGoOf,
    PagesMoved,
    StoreInPool,
)
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.asking import Asker
from tests.worker.engine.driver import byte_tokenizer
from tests.worker.engine.places import PAGE, Brake, Places, model_folder, until

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PROMPT = list(range(10, 10 + 6 * PAGE))
PAGES = len(PROMPT) // PAGE
STRANGERS = tuple(PageKey(bytes([at]) * 32) for at in range(3))
ON_ORDER = load_policies(
    "cluster: {migration: [{policy: spill-to-pool, as_made: false}]}", name="policies.yaml"
)


@pytest.fixture
async def places(index_settings: IndexSettings, tmp_path: Path) -> AsyncIterator[Places]:
    folder = byte_tokenizer(tmp_path / "tokenizer").folder
    places = Places(index_settings, model_folder(tmp_path, folder))
    await places.start()
    yield places
    await places.close()


class Ordered:
    """A worker that stores nothing in the pool unasked, with one prompt that it has computed."""

    def __init__(self, asker: Asker, keys: tuple[PageKey, ...]) -> None:
        self.asker = asker
        self.keys = keys

    async def ask(self, order: Message) -> PagesMoved:
        answer, _ = await self.asker.client.request(order, timeout_s=120)
        assert isinstance(answer, PagesMoved)
        return answer

    async def store(self, keys: tuple[PageKey, ...]) -> PagesMoved:
        return await self.ask(StoreInPool(new_request_id(), self.asker.client.epoch, keys))

    async def fetch(self, keys: tuple[PageKey, ...]) -> PagesMoved:
        return await self.ask(BringNear(new_request_id(), self.asker.client.epoch, keys))

    async def let_go(self, start: int, *, also_last: bool = False) -> PagesMoved:
        epoch = self.asker.client.epoch
        return await self.ask(LetGoOf(new_request_id(), epoch, self.keys, start, also_last))


async def ordered(places: Places, name: str, *, computes: bool = True) -> Ordered:
    worker = await places.worker(name, policies=ON_ORDER, attention="torch")
    asker = await places.asker(worker)
    root = worker.record.model_root
    assert root is not None
    if computes:
        await asker.ask([*PROMPT, 1], max_tokens=1)
    return Ordered(asker, tuple(page_keys(root, PROMPT, PAGE)))


async def test_pages_go_through_the_pool_from_one_worker_to_another_as_ordered(
    places: Places,
) -> None:
    node = await places.pool()
    one = await ordered(places, "w0")
    other = await ordered(places, "w1", computes=False)
    assert not sum(node.status().pages.values())
    stored = await one.store((*one.keys, *STRANGERS))
    assert (stored.pages, stored.left) == (PAGES, 0)
    assert stored.bytes > 0
    assert sum(node.status().pages.values()) == PAGES
    assert (await one.store(one.keys)).pages == 0, "it has them already"
    fetched = await other.fetch(other.keys)
    assert (fetched.pages, fetched.left, fetched.bytes) == (PAGES, 0, stored.bytes)
    assert (await other.fetch(other.keys)).pages == 0
    answer = await other.asker.ask([*PROMPT, 2], max_tokens=1)
    assert answer.started is not None
    assert answer.started.cached.host == len(PROMPT)
    statuses = [worker.status() for worker in places.workers]
    assert [one.pages_ordered_stored for one in statuses] == [PAGES, 0]
    assert [one.pages_ordered_fetched for one in statuses] == [0, PAGES]
    assert (await other.fetch(STRANGERS)).left == len(STRANGERS)


async def test_last_copies_stay_unless_the_order_says_so(places: Places) -> None:
    await places.pool()
    one = await ordered(places, "w0")
    assert ((kept := await one.let_go(2)).pages, kept.left) == (0, PAGES - 2)
    await one.store(one.keys[:4])
    assert ((gone := await one.let_go(2)).pages, gone.left) == (2, 2)
    assert ((gone := await one.let_go(0, also_last=True)).pages, gone.left) == (PAGES - 2, 0)
    answer = await one.asker.ask([*PROMPT, 2], max_tokens=1)
    assert answer.started is not None
    assert answer.started.cached.device == answer.started.cached.host == 0
    assert answer.started.cached.pool == 4 * PAGE


async def test_pages_in_use_stay(places: Places) -> None:
    await places.pool()
    one = await ordered(places, "w0")
    Brake(places.workers[0], pause_s=0.05)
    name, answer = await one.asker.send([*PROMPT, 3], max_tokens=450, ignore_eos=True)
    await one.asker.until_told(lambda: answer.started is not None)
    assert (await one.let_go(0, also_last=True)).pages == 0
    await one.asker.cancel(name)


async def test_without_a_pool_an_order_moves_nothing_and_too_much_is_refused(
    places: Places,
) -> None:
    one = await ordered(places, "w0")
    stored, fetched = await one.store(one.keys), await one.fetch(STRANGERS)
    assert (stored.pages, fetched.pages) == (0, 0)
    with pytest.raises(RefusedError) as caught:
        await one.store(one.keys[:1] * (MOST_PAGES + 1))
    assert caught.value.code is RefusalCode.BAD_MESSAGE
    assert places.workers[0].status().orders_refused == 1


async def test_a_worker_that_leaves_hands_on_what_only_it_has(places: Places) -> None:
    node = await places.pool()
    one = await ordered(places, "w0")
    running, _ = await one.asker.send([*PROMPT[:PAGE], 7, 7], max_tokens=40)
    ask = DrainNode(new_request_id(), one.asker.client.epoch, 60)
    drained, _ = await one.asker.client.request(ask, timeout_s=120)
    assert isinstance(drained, Drained)
    assert drained.left == 0
    assert drained.moved == sum(node.status().pages.values()) > PAGES
    assert one.asker.answers[running].finish_reason is not None, "what ran was finished"
    refused = await one.asker.ask([1, 2, 3])
    assert refused.refused is not None
    assert refused.refused.code is RefusalCode.DRAINING
    await until(lambda: places.mirror.places()[places.workers[0].record.place].draining)
    other = await ordered(places, "w1", computes=False)
    answer = await other.asker.ask([*PROMPT, 4], max_tokens=1)
    assert answer.started is not None
    assert answer.started.cached.pool == len(PROMPT)


async def test_without_a_pool_a_worker_keeps_what_only_it_has_and_says_so_when_it_leaves(
    places: Places,
) -> None:
    worker = await places.worker("w0", policies=ON_ORDER, pool=False, attention="torch")
    asker = await places.asker(worker)
    await asker.ask([*PROMPT, 1], max_tokens=1)
    root = worker.record.model_root
    assert root is not None
    one = Ordered(asker, tuple(page_keys(root, PROMPT, PAGE)))
    assert ((kept := await one.let_go(0)).pages, kept.left) == (0, PAGES), "they are last copies"
    ask = DrainNode(new_request_id(), asker.client.epoch, 60)
    drained, _ = await asker.client.request(ask, timeout_s=120)
    assert isinstance(drained, Drained)
    assert (drained.moved, drained.left) == (0, PAGES)


async def test_an_order_under_way_is_given_up_for_leaving(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await places.pool()
    one = await ordered(places, "w0")
    monkeypatch.setattr(Pace, "delay_s", lambda *_: 100.0)
    under_way = [asyncio.create_task(one.store(one.keys)) for _ in range(2)]
    orders = places.workers[0]._orders
    assert orders is not None
    await until(lambda: len(orders._tasks) == len(under_way))
    ask = DrainNode(new_request_id(), one.asker.client.epoch, 60)
    drained, _ = await one.asker.client.request(ask, timeout_s=120)
    assert isinstance(drained, Drained)
    assert drained.left == 0
    assert drained.moved == sum(node.status().pages.values())
    for order in under_way:
        with pytest.raises(RefusedError) as caught:
            await order
        assert caught.value.code is RefusalCode.DRAINING


async def test_an_engine_that_is_over_keeps_no_worker_from_leaving(places: Places) -> None:
    await places.pool()
    await ordered(places, "w0")
    worker = places.workers[0]
    thread = worker._thread
    assert thread is not None
    assert await asyncio.to_thread(thread.stop, 60.0)
    async with asyncio.timeout(120):
        await worker.drain(1.0)


async def test_a_recurrent_models_snapshots_go_along(places: Places, tmp_path: Path) -> None:
    places.folder = model_folder(tmp_path, places.folder, "qwen3_next")
    await places.pool()
    one = await ordered(places, "w0")
    other = await ordered(places, "w1", computes=False)
    assert (await one.store(one.keys)).left == 0
    answer = await other.asker.ask([*PROMPT, 2], max_tokens=1)
    assert answer.started is not None
    assert answer.started.cached.pool > 0

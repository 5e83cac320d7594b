"""`replicate-hot` with real pool nodes, a real worker and a real index: copies come, and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import cast

import pytest

from pie.index.mirror import Mirror
from pie.index.orders import Orders
from pie.index.settings import IndexSettings
from pie.page.key import page_keys
from pie.policies.cluster_policy import ClusterPolicy, ClusterView, SetCopies
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.pool.node import PoolNode
from pie.router.conductor import Conductor
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.ordering import Ordering
from pie.router.overview import Overview
from tests.support.redis_server import index_settings, redis_server, redis_url
from tests.worker.engine.driver import byte_tokenizer
from tests.worker.engine.places import PAGE, Places, model_folder, until

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PREFIX = list(range(10, 50))
PAGES = len(PREFIX) // PAGE
HOT = "cluster: {replication: {policy: replicate-hot, uses: 1, copies: 3, after: 10ms}}"


@pytest.fixture
async def places(index_settings: IndexSettings, tmp_path: Path) -> AsyncIterator[Places]:
    folder = byte_tokenizer(tmp_path / "tokenizer").folder
    places = Places(index_settings, model_folder(tmp_path, folder))
    await places.start()
    yield places
    await places.close()


def held(nodes: list[PoolNode]) -> list[int]:
    return sorted(sum(node.status().pages.values()) for node in nodes)


class Hangs:
    """A policy that never answers."""

    def __init__(self) -> None:
        self.asked = 0
        self.over = threading.Event()

    def decide(self, view: ClusterView) -> Iterable[SetCopies]:
        self.asked += 1
        self.over.wait(60)
        return ()


async def test_a_policy_that_hangs_holds_up_nobody_and_is_asked_once(
    index_settings: IndexSettings,
) -> None:
    policy = Hangs()
    spec = PolicySpec("hangs", cast(type[ClusterPolicy], lambda: policy))
    conductor = Conductor(
        index_settings.url,
        "router",
        Overview(Mirror(), dict, Demand(), Conversations()),
        Ordering(dict),
        PolicySet(replication=spec),
        settings=index_settings,
    )
    conductor.start()
    try:
        await until(lambda: policy.asked == 1)
        await asyncio.sleep(2.5)
        assert policy.asked == 1
        conductor.replace_policies(load_policies(HOT, name="policies.yaml").new_cluster())
        policy.over.set()
        await until(lambda: conductor.leads)
    finally:
        policy.over.set()
        await conductor.close()


async def test_a_hot_prefix_is_on_all_nodes_and_on_one_again_when_it_is_cold(
    places: Places,
) -> None:
    nodes = [await places.pool(f"pool-{number}") for number in range(3)]
    worker = await places.worker("w0")
    await (await places.asker(worker)).ask([*PREFIX, 1, 2], max_tokens=1)
    await until(lambda: held(nodes) == [0, 0, PAGES])
    root = worker.record.model_root
    assert root is not None
    demand = Demand()
    conductor = Conductor(
        places.index.url,
        "router",
        Overview(places.mirror, dict, demand, Conversations()),
        Ordering(dict),
        load_policies(HOT, name="policies.yaml"),
        settings=places.index,
    )
    conductor.start()
    try:

        def asked_for() -> bool:
            demand.used(page_keys(root, PREFIX, PAGE), time.monotonic())
            return held(nodes) == [PAGES, PAGES, PAGES]

        await until(asked_for)
        await until(lambda: held(nodes) == [0, 0, PAGES], timeout_s=60.0)
        other = await places.worker("w1")
        answer = await (await places.asker(other)).ask([*PREFIX, 3, 4], max_tokens=1)
        assert answer.started is not None
        assert answer.started.cached.pool == len(PREFIX)
        log = Orders(places.index.url, places.index)
        events = [(event.action, event.copies) for event in reversed(log.events(100))]
        assert events[0][0] == "raise"
        assert events[-2:] == [("lower", 2), ("lower", 1)]
        assert all("uses a second" in event.reason for event in log.events(100))
        log.close()
    finally:
        await conductor.close()

"""Pool nodes and clients that a test starts and need not stop."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from pie.page.events import Epoch, PlaceId
from pie.pool import links
from pie.pool.client import PoolClient
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.wire.errors import AddressError
from tests.pool.places import Places

StartNode = Callable[..., Awaitable[PoolNode]]
MakeClient = Callable[..., PoolClient]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node that is there counts as one that is not because the machine is busy."""
    monkeypatch.setattr(links, "_PATIENCE_S", 30.0)


@pytest.fixture
def places() -> Places:
    """The places that `start_node` adds its nodes to."""
    return Places()


@pytest.fixture
async def start_node(places: Places) -> AsyncIterator[StartNode]:
    """Starts nodes; stops and checks those that still run."""
    nodes: list[PoolNode] = []

    async def start(
        name: str = "pool-0",
        *,
        epoch: int = 1,
        address: str | None = None,
        secret: bytes | None = None,
        **settings: Any,
    ) -> PoolNode:
        node = PoolNode(
            PlaceId(name),
            PoolSettings.model_validate({"ram_budget": "8MiB", **settings}),
            index_url=None,
            epoch=Epoch(epoch),
            address=address,
            secret=secret,
            reader=places,
        )
        nodes.append(node)
        async with asyncio.timeout(60):
            while True:
                try:
                    places.up(await node.start())
                except AddressError:
                    # zmq frees the address of an earlier node on a thread of its own.
                    await asyncio.sleep(0.05)
                else:
                    return node

    yield start
    try:
        for node in nodes:
            await _checked(node)
    finally:
        for node in nodes:
            await node.close()


async def _checked(node: PoolNode, limit_s: float = 60) -> None:
    """Check a node once it is idle: pages may still be on their way between its tiers."""
    ends_s = time.monotonic() + limit_s
    while True:
        try:
            return node.check()
        except AssertionError:
            if time.monotonic() > ends_s:
                raise
        await asyncio.sleep(0.05)


@pytest.fixture
async def make_client(places: Places) -> AsyncIterator[MakeClient]:
    """Makes clients of the nodes in `places`, and closes them."""
    clients: list[PoolClient] = []

    def make(*, secret: bytes | None = None, **settings: Any) -> PoolClient:
        chosen = PoolSettings.model_validate(settings)
        clients.append(PoolClient(places, chosen, secret=secret))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()

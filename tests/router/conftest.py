"""A router in this process before mock workers in processes of their own, and a real Redis."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from openai import AsyncOpenAI

from pie.index.settings import IndexSettings
from pie.policies.aside import AsidePolicy
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.policies.routing import RoutingPolicy
from pie.policies.routing_aside import AsideRouting
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.tokens.tokenizer import Tokenizer
from tests.support.chat_folder import write_chat_folder
from tests.support.mock_worker import MockSpec, MockWorker
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

WAIT_S = 60.0
"""Longest wait for anything here; only a failing test waits so long."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a router would soon do without an answer, wait: on a busy machine all answers are late.

    Tests of doing without make an answer that never comes, or set times of their own.
    """
    monkeypatch.setattr("pie.index.commons.ANSWER_S", WAIT_S)
    monkeypatch.setattr("pie.router.quota._WAIT_S", WAIT_S)
    monkeypatch.setattr("pie.router.conductor.DEADLINE_S", WAIT_S)
    for aside in (AsideRouting, AsidePolicy):
        defaults = aside.__init__.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "deadline_s", WAIT_S)


@pytest.fixture(scope="session")
def chat_folder() -> Iterator[Path]:
    """A tokenizer with a chat template."""
    with tempfile.TemporaryDirectory(prefix="pie-chat-") as folder:
        yield write_chat_folder(Path(folder) / "chat")


async def until(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Wait until something is so."""
    end_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end_s, "it did not become so in time"
        await asyncio.sleep(0.01)


class Cluster:
    """Mocks and routers that share an index."""

    def __init__(self, folder: Path, chat_folder: Path, index: IndexSettings) -> None:
        self._folder = folder
        self._chat_folder = chat_folder
        self.index = index
        self.secret: bytes | None = None
        """What its routers share."""
        self.mocks: list[MockWorker] = []
        self.routers: list[RouterService] = []
        self._clients: list[AsyncOpenAI] = []

    def mock(self, place: str, **fields: Any) -> MockWorker:
        """Start a mock."""
        values: dict[str, Any] = {
            "place": place,
            "index": self.index.model_dump_json(),
            "tokenizer": str(self._chat_folder),
            "log": str(self._folder / f"{place}.log"),
        }
        mock = MockWorker(MockSpec(**(values | fields)), self._folder)
        self.mocks.append(mock)
        return mock

    async def router(
        self,
        workers: int,
        routing: RoutingPolicy | None = None,
        *,
        policies: PolicySet | None = None,
        routers: int = 1,
        **settings: Any,
    ) -> RouterService:
        """Start a router and wait until it knows so many workers."""
        if routing is not None:
            policies = _routed_by(routing)
        service = RouterService(
            RouterSettings(**({"port": 0} | settings)),
            index_url=self.index.url,
            index=self.index,
            policies=policies or PolicySet(),
            secret=self.secret,
            routers=routers,
        )
        self.routers.append(service)
        await service.start()
        if workers:
            await self.workers(service, workers)
        return service

    async def workers(self, service: RouterService, count: int) -> None:
        """Wait until a router takes requests for so many workers."""

        def there() -> bool:
            status = service.status()
            return status.usable_workers == count and bool(status.models)

        await until(there)

    def openai(self, service: RouterService, **options: Any) -> AsyncOpenAI:
        """Return OpenAI's own client for a router."""
        values: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S}
        client = AsyncOpenAI(base_url=f"{service.url}/v1", **(values | options))
        self._clients.append(client)
        return client

    def tokenizer(self, mock: MockWorker) -> Tokenizer:
        """Return the tokenizer that a mock has."""
        return Tokenizer.load(Path(mock.spec.tokenizer))

    async def close(self) -> None:
        """Stop everything."""
        for client in self._clients:
            await client.close()
        for router in self.routers:
            await router.close()
        for mock in self.mocks:
            mock.thaw()
            mock.kill()


@pytest.fixture
async def cluster(
    tmp_path: Path, chat_folder: Path, index_settings: IndexSettings
) -> AsyncIterator[Cluster]:
    """Nothing yet; what a test starts is stopped at its end."""
    cluster = Cluster(tmp_path, chat_folder, index_settings)
    yield cluster
    await cluster.close()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client."""
    async with httpx.AsyncClient(timeout=WAIT_S) as client:
        yield client


def _routed_by(policy: RoutingPolicy) -> PolicySet:
    """Return policies of which one chooses workers."""
    factory = cast(type[RoutingPolicy], lambda: policy)
    return PolicySet(routing=PolicySpec("of this test", factory))

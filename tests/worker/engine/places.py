"""Workers, pool nodes and readers over a real index, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings
from pie.worker.batch import Batch, StepOutput
from pie.worker.service import WorkerService
from pie.worker.settings import DEFAULT_CACHE_FOLDER, ModelSettings
from tests.support.models import save_tiny
from tests.worker.engine.asking import Asker

PAGE = 8


def model_folder(base: Path, tokenizer_folder: Path, kind: str = "llama") -> Path:
    """Write a tiny model with a tokenizer."""
    folder = save_tiny(kind, base / kind)
    shutil.copy(tokenizer_folder / "tokenizer.json", folder)
    return folder


def worker_settings(folder: Path, **fields: Any) -> ModelSettings:
    """Return settings for a tiny model in float32."""
    given: dict[str, Any] = {
        "source": str(folder),
        "dtype": "float32",
        "page_tokens": PAGE,
        "device_kv_budget": "2MiB",
        "threads": 1,
        "cache_folder": str(_cache_folder(folder.parent)),
        "transfer_timeout_s": 30.0,
    }
    return ModelSettings.model_validate(given | fields)


def _cache_folder(base: Path) -> Path:
    """Return one for what is kept of a model; the kernels, which take 20 s to build, are the host's."""
    kernels, folder = DEFAULT_CACHE_FOLDER.expanduser() / "native", base / "cache"
    kernels.mkdir(parents=True, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "native").symlink_to(kernels)
    return folder


class Places:
    """Starts places that share an index, and stops them all."""

    def __init__(self, index: IndexSettings, folder: Path) -> None:
        self.index = index
        self.folder = folder
        self.secret: bytes | None = None
        self.sockets = Path(tempfile.mkdtemp(prefix="pie"))
        self.mirror = Mirror()
        self.workers: list[WorkerService] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._epoch = 0

    async def start(self) -> None:
        feed = MirrorFeed(self.index.url, self.mirror, settings=self.index)
        await feed.start()
        self._closers.append(feed.close)

    async def pool(self, name: str = "pool-0") -> PoolNode:
        self._epoch += 1
        node = PoolNode(
            PlaceId(name),
            PoolSettings.model_validate({"ram_budget": "16MiB"}),
            index_url=self.index.url,
            index_settings=self.index,
            epoch=Epoch(self._epoch),
            address=f"ipc://{self.sockets}/{name}",
            secret=self.secret,
        )
        await node.start()
        self._closers.append(node.close)
        return node

    async def worker(
        self,
        name: str,
        *,
        pool: bool = True,
        address: str | None = None,
        on_dead: Callable[[BaseException], None] | None = None,
        policies: PolicySet | None = None,
        **fields: Any,
    ) -> WorkerService:
        self._epoch += 1
        worker = WorkerService(
            PlaceId(name),
            worker_settings(self.folder, **fields),
            policies=policies or PolicySet(),
            index_settings=self.index,
            index_url=self.index.url,
            address=f"ipc://{self.sockets}/{address or name}",
            epoch=Epoch(self._epoch),
            pool_settings=PoolSettings() if pool else None,
            secret=self.secret,
            on_dead=on_dead,
            debug=True,
        )
        self.workers.append(worker)
        self._closers.append(worker.close)
        await worker.start()
        await until(lambda: PlaceId(name) in self.mirror.places())
        return worker

    async def asker(self, worker: WorkerService) -> Asker:
        asker = Asker(worker.record.address)
        await asker.client.start()
        self._closers.append(asker.client.close)
        return asker

    async def close(self) -> None:
        for close in reversed(self._closers):
            await close()
        for worker in self.workers:
            worker.check()
        shutil.rmtree(self.sockets)


class Brake:
    """Holds a worker's steps up, so that an answer lasts as long as a test needs on any machine."""

    def __init__(self, worker: WorkerService, *, pause_s: float = 0.0) -> None:
        assert worker._engine is not None
        runner = worker._engine._runner
        self.pause_s = pause_s
        self.left: int | None = None
        """Steps before it stands still by itself."""
        self.free = threading.Event()
        self.free.set()
        self._run = runner.run
        runner.run = self._slowly  # type: ignore[method-assign]

    def _slowly(self, batch: Batch) -> StepOutput:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.free.clear()
        time.sleep(self.pause_s)
        assert self.free.wait(120)
        return self._run(batch)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 – other processes make it so
            await asyncio.sleep(0.01)

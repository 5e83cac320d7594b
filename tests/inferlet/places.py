"""Workers that run programs, and a router before them, for tests: real index, real wire, real HTTP."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from pydantic import ByteSize

from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet
from pie.router.service import RouterService
from pie.router.settings import RouterSettings
from pie.worker.service import WorkerService
from pie.worker.settings import ModelSettings, ProgramSettings

WAIT_S = 120.0


class Places:
    """Starts them, and stops them all."""

    def __init__(self, index: IndexSettings, model: Path, cache: Path) -> None:
        self._index = index
        self._model = model
        self._cache = cache
        self._sockets = Path(tempfile.mkdtemp(prefix="pie"))
        self.workers: list[WorkerService] = []
        self.router: RouterService | None = None
        self._epoch = 0

    @property
    def url(self) -> str:
        assert self.router is not None
        return self.router.url

    async def worker(self, name: str, **programs: Any) -> WorkerService:
        self._epoch += 1
        worker = WorkerService(
            PlaceId(name),
            ModelSettings(
                source=str(self._model),
                dtype="float32",
                device_kv_budget=ByteSize(4 << 20),
                attention="torch",
                cache_folder=self._cache,
                threads=1,
            ),
            policies=PolicySet(),
            index_settings=self._index,
            index_url=self._index.url,
            address=f"ipc://{self._sockets}/{name}-{self._epoch}",
            epoch=Epoch(self._epoch),
            programs=ProgramSettings(**({"allow": True, "wall_s": 240} | programs)),
        )
        self.workers.append(worker)
        await worker.start()
        return worker

    async def start_router(self, workers: int, **settings: Any) -> None:
        self.router = RouterService(
            RouterSettings(**({"port": 0} | settings)),
            index_url=self._index.url,
            index=self._index,
        )
        await self.router.start()
        until_s = time.monotonic() + WAIT_S
        while not (self.router.status().usable_workers == workers and self.router.status().models):
            assert time.monotonic() < until_s
            await asyncio.sleep(0.02)

    async def all_told(self) -> None:
        """Wait until the router knows which pages workers hold."""
        assert self.router is not None
        mirror = self.router._mirror
        async with asyncio.timeout(WAIT_S):
            for worker in self.workers:
                assert worker._publisher is not None
                while True:
                    keys, masks = await worker._publisher._gather()
                    if mirror.masks(worker.record.place) == {
                        bytes(key): int(mask) for key, mask in zip(keys, masks, strict=True)
                    }:
                        break
                    await asyncio.sleep(0.02)

    async def close(self) -> None:
        if self.router is not None:
            await self.router.close()
        for worker in self.workers:
            await worker.close()
            worker.check()
        shutil.rmtree(self._sockets)

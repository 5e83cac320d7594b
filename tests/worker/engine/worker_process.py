"""A worker as a process of its own, to be killed: `python worker_process.py PLACE ADDRESS MODEL INDEX`.

Writes its record as JSON, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet
from pie.pool.settings import PoolSettings
from pie.worker.service import WorkerService
from pie.worker.settings import ModelSettings


async def serve(place: str, address: str, model: str, index: str) -> None:
    index_settings = IndexSettings.model_validate_json(index)
    worker = WorkerService(
        PlaceId(place),
        ModelSettings.model_validate_json(model),
        policies=PolicySet(),
        index_settings=index_settings,
        index_url=index_settings.url,
        address=address,
        epoch=Epoch(time.time_ns()),
        pool_settings=PoolSettings(),
    )
    await worker.start()
    sys.stdout.write(msgspec.json.encode(worker.record).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

"""A worker as a process of its own, to be killed: `python -m tests.worker.engine.worker_process PLACE ADDRESS MODEL INDEX [STEPS]`.

Writes its record as JSON, and serves until its standard input ends. It stands still after so many steps
if there are any.
"""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec

from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.policies.policy_set import PolicySet
from pie.pool import links
from pie.pool.settings import PoolSettings
from pie.worker import offload
from pie.worker.service import WorkerService
from pie.worker.settings import ModelSettings
from tests.worker.engine.places import Brake


async def serve(place: str, address: str, model: str, index: str, steps: str = "0") -> None:
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
    # As in the tests themselves: a busy machine makes no load a miss.
    offload._LEAST_LOAD_S = links._PATIENCE_S = 30.0
    await worker.start()
    if int(steps):
        Brake(worker).left = int(steps)
    sys.stdout.write(msgspec.json.encode(worker.record).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))

"""A pool node with a disk as a process of its own: `python disk_node_process.py SETTINGS`.

Takes the index' settings and those of the pool as one JSON object, writes its record as JSON, and
serves until its input ends.
"""

import asyncio
import json
import sys
import time

import msgspec

from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId
from pie.pool.node import PoolNode
from pie.pool.settings import PoolSettings


async def serve() -> None:
    given = json.loads(sys.argv[1])
    index = IndexSettings.model_validate(given["index"])
    node = PoolNode(
        PlaceId("pool-0"),
        PoolSettings.model_validate(given["pool"]),
        index_url=index.url,
        index_settings=index,
        epoch=Epoch(time.time_ns() // 1000),
    )
    record = await node.start()
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await node.drain(60)
    await node.close()


if __name__ == "__main__":
    asyncio.run(serve())

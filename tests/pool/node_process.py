"""A pool node as a process of its own, to be killed: `python node_process.py`.

Writes its record as JSON, takes its time for every page that it sends, and sends the first ones only.
"""

import asyncio
import sys
import time

import msgspec

from pie.page.events import Epoch, PlaceId
from pie.page.lookup import LookupStatus
from pie.pool.node import PoolNode
from pie.pool.ram import RamTier
from pie.pool.settings import PoolSettings
from pie.pool.tier import PageId, StoredPage

PAGE_S = 0.05
PAGES = 24


class SlowRamTier(RamTier):
    left = PAGES

    def prepare_load(self, page: PageId) -> StoredPage | LookupStatus:
        time.sleep(PAGE_S if self.left else 600)
        self.left -= 1
        return super().prepare_load(page)


async def serve() -> None:
    settings = PoolSettings.model_validate({"ram_budget": "256MiB"})
    node = PoolNode(PlaceId("pool-0"), settings, index_url=None, epoch=Epoch(time.time_ns()))
    # The same tier, only slower.
    node._tier.__class__ = SlowRamTier
    record = await node.start()
    sys.stdout.write(msgspec.json.encode(record).decode() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await node.close()


if __name__ == "__main__":
    asyncio.run(serve())

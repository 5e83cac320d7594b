"""A router in a process of its own, to be killed: `python -m tests.router.one_router INDEX PORT`.

INDEX is the index's settings as JSON. Says its name in a line once it serves, and goes on until its standard input ends.
"""

from __future__ import annotations

import asyncio
import sys

from pie.index.settings import IndexSettings
from pie.router.service import RouterService
from pie.router.settings import RouterSettings


async def main(index: IndexSettings, port: int) -> None:
    """Serve on a port that others may share."""
    service = RouterService(RouterSettings(port=port), index_url=index.url, index=index, routers=2)
    await service.start()
    sys.stdout.write(f"{service.name}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await service.close()


if __name__ == "__main__":
    asyncio.run(main(IndexSettings.model_validate_json(sys.argv[1]), int(sys.argv[2])))

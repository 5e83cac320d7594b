"""A shelf in Redis in parts, so that no command on one of them takes long, however much is kept.

Covers which part a value lies in, and what all of them are together. Does not cover a part
(`pie.index.shelf_redis`). The first in order of its own part are forgotten, each of which has an equal share of what
may be kept. How many parts there are is no setting's: routers of other limits find what was put, and forget what is
beyond their own.

Valkey makes the table of a hash or sorted set smaller in one go when that has become empty for the most part: 37 ms where
it had 300,000 entries, 15 ms where it had 100,000, and some 4 ms where it had 27,000. A part of the default shelf has
14,000 of the smallest at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final
from zlib import crc32

from pie.index.commons import Commons
from pie.index.shelf import Latest, ShelfLimits
from pie.index.shelf_redis import RedisShelf

PARTS: Final = 16
"""As many as leave a part of the default budget, 64 MiB, the largest value; each is asked for what was put last."""


class PartedShelf:
    """A shelf that all routers of a cluster share, in `PARTS` parts.

    Args:
        commons: Redis.
        name: The shelf's.
        limits: How much it keeps. A value that takes more than a part's share is too large.
    """

    def __init__(self, commons: Commons, name: str, limits: ShelfLimits) -> None:
        share = ShelfLimits(
            math.ceil(limits.most / PARTS),
            limits.budget_bytes // PARTS,
            limits.ttl_s,
            limits.by_use,
        )
        self._parts = [RedisShelf(commons, f"{name}.{at}", share) for at in range(PARTS)]

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Do as `Shelf.put` says."""
        by_part: dict[RedisShelf, list[tuple[str, bytes]]] = {}
        for one in values:
            by_part.setdefault(self._part(one[0]), []).append(one)
        for part, some in by_part.items():
            await part.put(some)

    def takes(self, name: str, value: bytes) -> bool:
        """Do as `Shelf.takes` says."""
        return self._part(name).takes(name, value)

    async def get(self, name: str) -> bytes | None:
        """Do as `Shelf.get` says."""
        return await self._part(name).get(name)

    async def latest(self, most: int) -> Latest:
        """Do as `Shelf.latest` says."""
        told = [await part.latest_at(most) for part in self._parts]
        found = sorted((one for stamped, _, _ in told for one in stamped), reverse=True)
        names = [name for _, name in found[:most]]
        return Latest(names, sum(count for _, count, _ in told), sum(size for _, _, size in told))

    async def trim(self) -> None:
        """Remove what is old, or more than is kept: some thousand values of each part at most.

        Raises:
            PageIndexError: Nobody knows.
        """
        for part in self._parts:
            await part.trim()

    def _part(self, name: str) -> RedisShelf:
        return self._parts[crc32(name.encode()) % len(self._parts)]

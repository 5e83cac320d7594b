"""What is put behind one's back comes in order, waits while nobody takes it, and is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pie.index.errors import IndexUnavailableError
from pie.index.shelf import Latest, MemoryShelf, ShelfLimits
from pie.index.shelf_behind import Behind

LIMITS = ShelfLimits(100_000, 1 << 30, 60)


class Taking:
    """A shelf that takes values only when a test says so."""

    def __init__(self) -> None:
        self.inner = MemoryShelf(LIMITS)
        self.batches: list[int] = []
        self.is_away = False

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            raise IndexUnavailableError("away")
        self.batches.append(len(values))
        await self.inner.put(values)

    def takes(self, name: str, value: bytes) -> bool:
        return self.inner.takes(name, value)

    async def get(self, name: str) -> bytes | None:
        return await self.inner.get(name)

    async def latest(self, most: int) -> Latest:
        return await self.inner.latest(most)


async def test_values_go_together_and_in_order() -> None:
    shelf = Taking()
    behind = Behind(shelf)
    for number in range(150):
        behind.put(str(number), b"x")
    await behind.close()
    assert not behind
    assert shelf.batches == [64, 64, 22]
    assert (await shelf.latest(2)).names == ["149", "148"]


async def test_the_first_are_dropped_and_counted_where_nobody_takes_them() -> None:
    shelf, dropped = Taking(), list[int]()
    shelf.is_away = True
    behind = Behind(shelf, dropped.append)
    for number in range(5_000):
        behind.put(str(number), b"x")
    assert len(behind) == 4_096
    assert sum(dropped) == 5_000 - 4_096
    for number in range(3):
        behind.put(f"large {number}", b"x" * (5 << 20))
    assert len(behind) == 1
    await asyncio.sleep(0.1)
    shelf.is_away = False
    behind.put("small", b"x")
    for _ in range(3_000):
        if not behind:
            break
        await asyncio.sleep(0.02)
    assert (await shelf.latest(9)).names == ["small", "large 2"]
    await behind.close()


async def test_what_nobody_takes_at_the_end_is_counted() -> None:
    shelf, dropped = Taking(), list[int]()
    shelf.is_away = True
    behind = Behind(shelf, dropped.append)
    behind.put("a", b"x")
    await behind.close()
    assert dropped == [1]

"""The suite that all shelves pass: what was put is there for all, within the limits.

Covers the contract of `pie.index.shelf`. An implementation is tested by a subclass:

    class TestMyShelf(ShelfConformance):
        @asynccontextmanager
        async def shelves(self, limits: ShelfLimits) -> AsyncIterator[tuple[Shelf, Shelf]]:
            ...

pytest runs it, with asynchronous tests on (`asyncio_mode = "auto"`).
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager

from pie.index.shelf import ENTRY_BYTES, Shelf, ShelfLimits

_LARGE = 1 << 20


class ShelfConformance:
    """What every implementation must do."""

    def shelves(self, limits: ShelfLimits) -> AbstractAsyncContextManager[tuple[Shelf, Shelf]]:
        """Return one empty shelf, as two see it."""
        raise NotImplementedError

    async def test_what_one_puts_another_gets(self) -> None:
        """Values are those that were put last under their names."""
        async with self.shelves(ShelfLimits(10, _LARGE, 60)) as (one, other):
            await one.put([("a", b"1"), ("b", bytes(range(256))), ("empty", b"")])
            assert await other.get("a") == b"1"
            assert await other.get("b") == bytes(range(256))
            assert await other.get("empty") == b""
            assert await other.get("c") is None
            await other.put([("a", b"2" * 500)])
            assert await one.get("a") == b"2" * 500

    async def test_the_first_are_forgotten_beyond_a_number(self) -> None:
        """By the order in which they were put."""
        async with self.shelves(ShelfLimits(3, _LARGE, 60)) as (one, _):
            for name in "abcd":
                await one.put([(name, b"x")])
                await asyncio.sleep(0.002)
                assert await one.get("a") == (None if name == "d" else b"x")
            assert (await one.latest(2)).names == ["d", "c"]
            assert (await one.latest(9)).count == 3

    async def test_the_first_are_forgotten_beyond_so_many_bytes(self) -> None:
        """Names and entries count as well."""
        async with self.shelves(ShelfLimits(1000, 10 * (ENTRY_BYTES + 200), 60)) as (one, _):
            for number in range(40):
                await one.put([(str(number), b"x" * 100)])
                await asyncio.sleep(0.002)
            latest = await one.latest(99)
            assert latest.names == [str(39 - at) for at in range(latest.count)]
            assert 10 <= latest.count <= 13
            assert latest.used_bytes <= 10 * (ENTRY_BYTES + 200)
            await one.put([("large", b"x" * 3000)])
            assert (await one.latest(99)).count < 8
            assert (await one.latest(1)).names == ["large"]
            before = await one.latest(99)
            await one.put([("too large", b"x" * 6000)])
            assert await one.latest(99) == before

    async def test_what_it_takes_it_keeps(self) -> None:
        """And nothing that is larger."""
        async with self.shelves(ShelfLimits(9, ENTRY_BYTES + 200, 60)) as (one, other):
            taken = [size for size in range(220) if one.takes("a", b"x" * size)]
            assert taken == list(range(len(taken)))
            assert taken[-1] > 100
            await one.put([("a", b"x" * (taken[-1] + 1))])
            assert await other.get("a") is None
            await one.put([("a", b"x" * taken[-1])])
            assert await other.get("a") == b"x" * taken[-1]

    async def test_use_keeps_where_it_counts(self) -> None:
        """The least recently used is forgotten."""
        async with self.shelves(ShelfLimits(2, _LARGE, 60, by_use=True)) as (one, other):
            await one.put([("a", b"1")])
            await asyncio.sleep(0.002)
            await one.put([("b", b"2")])
            await asyncio.sleep(0.002)
            assert await other.get("a") == b"1"
            await asyncio.sleep(0.002)
            await one.put([("c", b"3")])
            assert await one.get("b") is None
            assert await one.get("a") == b"1"

    async def test_what_is_old_is_forgotten(self) -> None:
        """By age, whether or not anybody puts more."""
        async with self.shelves(ShelfLimits(10, _LARGE, 0.05)) as (one, _):
            await one.put([("a", b"1")])
            await asyncio.sleep(0.1)
            assert await one.get("a") is None
            await one.put([("b", b"2")])
            assert (await one.latest(9)).names in (["b"], [])

    async def test_a_shelf_of_nothing_keeps_nothing(self) -> None:
        """Where it is turned off."""
        async with self.shelves(ShelfLimits(0, _LARGE, 60)) as (one, _):
            await one.put([("a", b"1")])
            assert await one.get("a") is None
            assert (await one.latest(9)).count == 0

    async def test_many_are_put_at_once(self) -> None:
        """More than one step of an implementation takes, and more to forget than one step does."""
        async with self.shelves(ShelfLimits(2000, _LARGE, 60)) as (one, other):
            await one.put([(f"{number:04}", b"x") for number in range(1000)])
            assert (await other.latest(1)).count == 1000
            large = _LARGE - 2 * ENTRY_BYTES
            await one.put([("large", b"x" * large)])
            latest = await other.latest(5)
            assert latest.names[0] == "large"
            assert latest.count <= 2
            assert latest.used_bytes <= _LARGE

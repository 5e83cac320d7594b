"""Shelves in one process, in Redis and sealed: the suite, and what Redis is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from zlib import crc32

import pytest

from pie.index.client import make_client
from pie.index.commons import Commons
from pie.index.errors import IndexUnavailableError
from pie.index.settings import IndexSettings
from pie.index.shelf import MemoryShelf, Shelf, ShelfLimits
from pie.index.shelf_behind import Behind
from pie.index.shelf_conformance import ShelfConformance
from pie.index.shelf_parted import PARTS, PartedShelf
from pie.index.shelf_redis import LINGER_S, MOST_VALUE_BYTES, RedisShelf
from pie.index.shelf_sealed import SealedShelf
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

LIMITS = ShelfLimits(10, 64 << 20, 60)


class TestMemory(ShelfConformance):
    @asynccontextmanager
    async def shelves(self, limits: ShelfLimits) -> AsyncIterator[tuple[Shelf, Shelf]]:
        shelf = MemoryShelf(limits)
        yield shelf, shelf
        shelf.check()


class TestRedis(ShelfConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, index_settings: IndexSettings) -> None:
        self.settings = index_settings

    def shelf(self, commons: Commons, limits: ShelfLimits) -> Shelf:
        return RedisShelf(commons, "s", limits)

    @asynccontextmanager
    async def shelves(self, limits: ShelfLimits) -> AsyncIterator[tuple[Shelf, Shelf]]:
        one, other = (Commons(self.settings.url, self.settings, 10.0) for _ in range(2))
        yield self.shelf(one, limits), self.shelf(other, limits)
        await one.close()
        await other.close()
        check(self.settings, limits)


class TestSealed(TestRedis):
    def shelf(self, commons: Commons, limits: ShelfLimits) -> Shelf:
        return SealedShelf(RedisShelf(commons, "s", limits), "s", bytes(32))


def check(settings: IndexSettings, limits: ShelfLimits) -> None:
    """Assert that the shelf in Redis agrees with itself."""
    base = f"{settings.key_prefix}:{{shelf:s}}"
    client: Any
    with make_client(settings.url, settings) as client:
        values = client.hgetall(f"{base}:values")
        assert set(client.zrange(f"{base}:order", 0, -1)) == set(values)
        said = int(client.get(f"{base}:bytes") or 0)
        assert said == sum(300 + len(name) + len(value) for name, value in values.items())
        for key in client.keys(f"{base}:*"):
            assert limits.ttl_s < client.pttl(key) / 1000 <= limits.ttl_s + LINGER_S


@pytest.fixture
async def commons(index_settings: IndexSettings) -> AsyncIterator[Commons]:
    commons = Commons(index_settings.url, index_settings, 10.0)
    yield commons
    await commons.close()


async def test_what_is_sealed_is_read_by_those_with_the_secret_under_its_own_name(
    commons: Commons, index_settings: IndexSettings
) -> None:
    plain = RedisShelf(commons, "s", LIMITS)
    ours, theirs = (SealedShelf(plain, "s", bytes([n] * 32)) for n in (1, 2))
    await ours.put([("a", b"what was said"), ("b", b"")])
    assert await ours.get("a") == b"what was said"
    assert await theirs.get("a") is None
    sealed = await plain.get("a")
    assert sealed is not None
    assert b"said" not in sealed
    await plain.put(
        [
            ("c", sealed),
            ("d", b"short"),
            ("e", b"no such thing at all, but long enough"),
            ("f", b""),
        ]
    )
    for name in "cdef":
        assert await ours.get(name) is None
    await plain.put([("a", sealed[:-1] + bytes([sealed[-1] ^ 1]))])
    assert await ours.get("a") is None
    other = SealedShelf(RedisShelf(commons, "other", LIMITS), "other", bytes([1] * 32))
    await RedisShelf(commons, "other", LIMITS).put([("a", sealed)])
    assert await other.get("a") is None
    check(index_settings, LIMITS)


@pytest.mark.parametrize("part", ["values", "order", "bytes"])
async def test_what_somebody_else_wrote_or_removed_is_an_empty_shelf(
    commons: Commons, index_settings: IndexSettings, part: str
) -> None:
    shelf = RedisShelf(commons, "s", LIMITS)
    key = f"{index_settings.key_prefix}:{{shelf:s}}:{part}"
    client: Any
    with make_client(index_settings.url, index_settings) as client:
        for is_other in (False, True):
            await shelf.put([("a", b"1")])
            client.delete(key)
            if is_other:
                client.sadd(key, "x")
            assert await shelf.get("a") is None
            assert (await shelf.latest(9)).count == 0
            await shelf.put([("b", b"2")])
            assert await shelf.get("b") == b"2"
            check(index_settings, LIMITS)


async def test_a_shelf_is_in_parts_and_still_one(
    commons: Commons, index_settings: IndexSettings
) -> None:
    limits = ShelfLimits(40_000, 64 << 20, 60)
    one, other = (PartedShelf(commons, "s", limits) for _ in range(2))
    names = [f"{number:03}" for number in range(300)]
    await one.put([(name, name.encode()) for name in names])
    for name in names[::30]:
        assert await other.get(name) == name.encode()
    latest = await other.latest(400)
    assert sorted(latest.names) == names
    assert (latest.count, latest.used_bytes) == (300, 300 * 306)
    for name in ("last but one", "last"):
        await asyncio.sleep(0.002)
        await one.put([(name, b"x")])
    assert (await other.latest(2)).names == ["last", "last but one"]
    client: Any
    with make_client(index_settings.url, index_settings) as client:
        sizes = [client.hlen(key) for key in client.keys(f"{index_settings.key_prefix}:*:values")]
    assert len(sizes) == PARTS
    assert sum(sizes) == 302
    assert max(sizes) < 60
    assert one.takes("a", bytes(MOST_VALUE_BYTES - 999))
    # Each part forgets what is beyond its own share.
    large = bytes(3 << 20)
    await one.put([(str(number), large) for number in range(12)])
    assert (await other.latest(99)).used_bytes <= len(
        {crc32(b"%d" % n) % PARTS for n in range(12)}
    ) * (4 << 20)
    await PartedShelf(commons, "s", ShelfLimits(40_000, 64 << 20, 0.001)).trim()
    assert (await other.latest(99)).count == 0


async def test_what_was_put_is_found_by_routers_of_other_limits_who_forget_what_is_beyond_theirs(
    commons: Commons,
) -> None:
    limits = ShelfLimits(100_000, 64 << 20, 60)
    shelf = PartedShelf(commons, "s", limits)
    names = [f"{number:03}" for number in range(200)]
    await shelf.put([(name, name.encode()) for name in names])
    for most, budget_bytes in ((1_000_000, 128 << 20), (100_000, 1 << 20), (16_000, 1 << 30)):
        other = PartedShelf(commons, "s", ShelfLimits(most, budget_bytes, 60))
        assert (await other.latest(200)).count == 200
        for name in names[::20]:
            assert await other.get(name) == name.encode()
    smaller = PartedShelf(commons, "s", ShelfLimits(80, 64 << 20, 60))
    await smaller.trim()
    latest = await shelf.latest(200)
    assert latest.count <= 80
    assert latest == await smaller.latest(200)


async def test_what_would_keep_redis_busy_is_not_put(commons: Commons) -> None:
    shelf = RedisShelf(commons, "s", LIMITS)
    await shelf.put([("a", b"x" * MOST_VALUE_BYTES), ("b", b"x")])
    assert await shelf.get("a") is None
    assert await shelf.get("b") == b"x"


class DeafShelf(MemoryShelf):
    """Takes nothing, and loses cancellations, as libraries do now and then."""

    def __init__(self) -> None:
        super().__init__(ShelfLimits(9, 999, 60.0))
        self.asked = asyncio.Event()

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        self.asked.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        raise IndexUnavailableError("Redis: no answer")


async def test_closing_ends_where_a_cancellation_is_lost() -> None:
    shelf, dropped = DeafShelf(), 0

    def drop(count: int) -> None:
        nonlocal dropped
        dropped += count

    behind = Behind(shelf, drop)
    behind.put("a", b"x")
    async with asyncio.timeout(50):
        await shelf.asked.wait()
        await behind.close()
    assert dropped == 1

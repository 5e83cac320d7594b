"""Somebody else writes over a place's keys: others are read on, and the place writes its own anew."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest
import redis.asyncio

from pie.index.conformance import entry, key, record
from pie.index.contract import IndexMode
from pie.index.epochs import next_epoch
from pie.index.feed import MirrorFeed
from pie.index.lookup import DirectLookup
from pie.index.mirror import Mirror
from pie.index.names import PlaceKeys, places_key
from pie.index.reading import parse_masks
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PageStored, PlaceId
from tests.index.places import WITHIN_S, Index, Place, running, until

pytestmark = pytest.mark.live

W0, W1, W9 = PlaceId("w0"), PlaceId("w1"), PlaceId("w9")
Damage = Callable[[redis.asyncio.Redis, IndexSettings, PlaceKeys], Awaitable[object]]


async def over(client: redis.asyncio.Redis, name: str) -> None:
    """Put something of a type that nothing of ours has under a name."""
    await client.delete(name)
    await client.lpush(name, "x")


def field(name: str, value: str | bytes) -> Damage:
    return lambda client, _, keys: client.hset(keys.record, name, value)


DAMAGES: dict[str, Damage] = {
    "the record is of another type": lambda client, _, keys: over(client, keys.record),
    "the stream is of another type": lambda client, _, keys: over(client, keys.stream),
    "the sign of life is of another type": lambda client, _, keys: over(client, keys.alive),
    "the pages are of another type": lambda client, _, keys: over(client, keys.pages("1.1")),
    "the list is of another type": lambda client, settings, _: over(
        client, places_key(settings.key_prefix)
    ),
    "the record cannot be read": field("record", b"\xff\xfe"),
    "the record is another place's": field("record", msgspec.msgpack.encode(record("w1"))),
    "the record is of another start": field("record", msgspec.msgpack.encode(record("w0", 7))),
    "the generation cannot be read": field("generation", b"\xff\xfe"),
    "the epoch is no number": field("epoch", "x"),
    "the epoch is long and no number": field("epoch", "x" * 50),
    "the number of pages is none": field("pages", "x"),
    "the event's number is none": field("seq", "x"),
    "the event's number is below 0": field("seq", "-5"),
    "the event's number is far off": field("seq", str(2**70)),
    "the event's number has not been": field("seq", "1000"),
}


@pytest.mark.parametrize("what", DAMAGES)
async def test_a_place_mends_what_somebody_else_has_written_over(
    index_settings: IndexSettings, what: str
) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        other = await index.join("w1", holding=5)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        await DAMAGES[what](index.redis, index_settings, keys)
        newcomer = Mirror()
        feed = index.new_feed(newcomer)
        await feed.start()
        await until(lambda: W1 in newcomer.places(), "the others are read")
        place.store(50)
        other.store(50)
        for mirror in (newcomer, index.mirror):
            await index.settled(mirror)
        await until(lambda: place.publisher.mode is IndexMode.OK, "published")
        assert not place.publisher.fenced
        await feed.close()


@pytest.mark.parametrize("what", DAMAGES)
async def test_a_place_mends_it_without_anything_to_say(
    index_settings: IndexSettings, what: str
) -> None:
    async with running(index_settings) as index:
        await index.join("w0", holding=10)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        await DAMAGES[what](index.redis, index_settings, keys)
        mirror = Mirror()
        feed = index.new_feed(mirror)
        await feed.start()
        await index.settled(mirror)
        await feed.close()


async def dead_place(index: Index, settings: IndexSettings, *, ttl_s: float = 60.0) -> PlaceKeys:
    """Write a place that counts as alive and mends nothing."""
    keys = PlaceKeys(settings.key_prefix, W9)
    said = msgspec.msgpack.encode(record("w9", ttl_s=ttl_s))
    await index.redis.hset(
        keys.record,
        mapping={"epoch": "1", "generation": "1.1", "seq": "1", "pages": "1", "record": said},
    )
    await index.redis.hset(keys.pages("1.1"), key(0), "1")
    await index.redis.xadd(keys.stream, {"announced": "1.1"}, id="1-1")
    await index.redis.set(keys.alive, "1", ex=60)
    await index.redis.sadd(places_key(settings.key_prefix), W9)
    return keys


async def test_a_dead_place_is_gone_whatever_became_of_the_clock(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings) as index:
        keys = await dead_place(index, index_settings, ttl_s=1.0)
        for left_s in (86_400, None):
            await index.redis.set(keys.alive, "1", ex=left_s)
            await index.redis.sadd(places_key(index_settings.key_prefix), W9)
            await until(lambda: W9 in index.mirror.places(), "it is read")
            await until(lambda: W9 not in index.mirror.places(), "it is gone")


async def test_a_place_that_says_to_live_for_ever_is_left_out_alone(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        keys = await dead_place(index, index_settings, ttl_s=1e300)
        await index.redis.persist(keys.alive)
        modes: list[IndexMode] = []
        mirror = Mirror()
        feed = MirrorFeed(index_settings.url, mirror, settings=index_settings, on_mode=modes.append)
        await feed.start()
        await until(lambda: mirror.mode is IndexMode.OK, "the others are read")
        place.store(50)
        await index.settled(mirror)
        assert set(mirror.places()) == {W0}
        assert IndexMode.DEGRADED not in modes
        await feed.close()


@pytest.mark.parametrize("what", ["record", "alive", "stream", "pages"])
async def test_a_place_that_mends_nothing_is_left_out_alone_and_said_once(
    index_settings: IndexSettings, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        keys = await dead_place(index, index_settings)
        await until(lambda: set(index.mirror.places()) == {W0, W9}, "both are read")
        name = keys.pages("1.1") if what == "pages" else f"{getattr(keys, what)}"
        await over(index.redis, name)
        mirror = Mirror()
        feed = MirrorFeed(index_settings.url, mirror, settings=index_settings)
        caplog.clear()
        await feed.start()
        for number in range(100, 120):
            place.store(number)
            assert await place.publisher.flushed(WITHIN_S)
        for seen in (mirror, index.mirror):
            await until(_equal(seen, place), "w0 is followed")
            assert seen.mode is not IndexMode.DEGRADED
        assert W9 not in mirror.places()
        assert DirectLookup(index_settings.url, settings=index_settings).places().keys() >= {W0}
        said = [r for r in caplog.records if "w9" in r.message and "left out" in r.message]
        assert len(said) <= 2, "once by each reader"
        await feed.close()


def _equal(mirror: Mirror, place: Place) -> Callable[[], bool]:
    return lambda: mirror.masks(place.name) == place.masks()


async def test_what_no_place_would_have_written_of_a_page_is_left_out() -> None:
    good = entry(1).key
    found = {good: b"3", b"short": b"1", entry(2).key: b"x", entry(3).key: b"-1"}
    found |= {entry(4).key: str(2**32).encode(), entry(5).key: b"0"}
    assert list(parse_masks(found)) == [(good, 3)]


async def test_an_event_of_another_place_is_not_taken_in(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        await index.join("w0", holding=3)
        await index.join("w1", holding=3)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        seq = int(await index.redis.hget(keys.record, "seq") or 0)
        event = PageStored(W1, Epoch(1), seq + 1, (entry(99),))
        await index.redis.xadd(
            keys.stream, {"event": msgspec.msgpack.encode(event)}, id=f"1-{seq + 1}"
        )
        await until(lambda: index.feed.resyncs > 2, "the place is read anew")
        assert key(99) not in index.mirror.masks(W1)
        await index.settled()


async def test_a_start_is_numbered_whatever_is_written_there(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        keys = PlaceKeys(index_settings.key_prefix, W0)
        await index.redis.hset(keys.record, "epoch", "x")
        assert await next_epoch(index_settings.url, index_settings, W0, clock_ns=lambda: 5) == 5
        await over(index.redis, keys.record)
        assert await next_epoch(index_settings.url, index_settings, W0, clock_ns=lambda: 5) == 5

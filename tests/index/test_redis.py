"""What lies in Redis stays bounded and true: late commands, pages lost alone, long announcements."""

import asyncio
import math
import os
import signal
import time

import msgspec
import pytest

from pie.index import remote
from pie.index.client import _FIRST_WAIT_S, make_async_client
from pie.index.conformance import entry, record
from pie.index.contract import IndexMode
from pie.index.feed import _LONGEST_RETRY_S, MirrorFeed
from pie.index.lookup import DirectLookup
from pie.index.mirror import Mirror
from pie.index.names import PlaceKeys
from pie.index.reading import Announced, Announcement, PlaceReader, parse_announcement
from pie.index.remote import RemotePlace
from pie.index.scripts import ANNOUNCE
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.columns import masks_of
from pie.page.events import PlaceId
from tests.index.places import WITHIN_S, running, until

pytestmark = pytest.mark.live

W0 = PlaceId("w0")


def test_what_redis_says_of_a_place_and_what_that_means() -> None:
    said = msgspec.msgpack.encode(record("w0"))
    up = [b"1", said, b"1.1", b"7"]
    gone = [b"1", None, None, None]
    nothing = [None] * 4
    assert isinstance(parse_announcement(up, b"1"), Announcement)
    assert parse_announcement(up, None) is Announced.NOTHING
    assert parse_announcement(up, b"2") is Announced.WITHDRAWN, "a later start is on its way"
    assert parse_announcement(gone, None) is Announced.WITHDRAWN
    assert parse_announcement(gone, b"1") is Announced.WITHDRAWN
    assert parse_announcement(nothing, b"1") is Announced.COMING
    assert parse_announcement(nothing, None) is Announced.NOTHING
    assert parse_announcement([b"1", b"?", b"1.1", b"7"], b"1") is Announced.UNREADABLE
    for ttl_s in (0.0, -1.0, 1e300, math.inf, math.nan):
        said = msgspec.msgpack.encode(record("w0", ttl_s=ttl_s))
        assert parse_announcement([b"1", said, b"1.1", b"7"], b"1") is Announced.UNREADABLE


async def test_after_standing_still_longer_than_places_live_nobody_announces_anew(
    own_redis_server: EmbeddedServer,
) -> None:
    settings = IndexSettings(
        url=own_redis_server.url, ttl_s=1.0, poll_s=0.05, request_timeout_s=20.0
    )
    async with running(settings) as index:
        for name in ("w0", "w1"):
            (await index.join(name)).store(*range(100))
        await index.settled()
        assert own_redis_server.pid is not None
        os.kill(own_redis_server.pid, signal.SIGSTOP)
        # No request times out, so that nobody notices: records just are not renewed.
        await asyncio.sleep(2.0)
        os.kill(own_redis_server.pid, signal.SIGCONT)
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            assert set(index.mirror.places()) == {"w0", "w1"}
            await asyncio.sleep(0.01)
        await index.settled()
        assert [place.snapshots for place in index.places.values()] == [1, 1]


async def test_a_place_stays_while_it_takes_longer_to_announce_than_it_may_be_silent(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(index_settings.model_copy(update={"ttl_s": 1.0})) as index:
        place = await index.join("w0", holding=200)
        await index.settled()
        monkeypatch.setattr(remote, "_FILL_PAGES", 1)
        fill = place.publisher._remote._fill

        async def slow_fill(*, keys: list[str], args: list[bytes | int]) -> bytes:
            await asyncio.sleep(0.01)
            answer: bytes = await fill(keys=keys, args=args)
            return answer

        monkeypatch.setattr(place.publisher._remote, "_fill", slow_fill)
        for name in await index.redis.keys(f"{index_settings.key_prefix}:*"):
            await index.redis.delete(name)
        await until(lambda: place.snapshots == 2, "announcing")
        began_s = time.monotonic()
        while place.publisher.mode is not IndexMode.OK:
            assert set(index.mirror.places()) == {"w0"}
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_s > 1.5, "too fast to show anything"
        await index.settled()


async def test_pages_that_redis_drops_alone_are_written_anew(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        await index.redis.delete(keys.pages("1.1"))
        await until(lambda: place.snapshots == 2, "announcing anew")
        assert await place.publisher.flushed(WITHIN_S)
        await index.settled()
        await until(lambda: place.publisher.mode is IndexMode.OK, "announced")
        assert await index.redis.hlen(keys.pages("1.2")) == 10


async def test_what_redis_refuses_for_good_is_written_anew(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        await index.redis.set(keys.pages("1.1"), "somebody else's")
        place.store(50)
        await index.settled()
        assert place.snapshots == 2


async def test_an_announcement_that_arrives_late_does_not_count(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        place.store(11)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        late = keys.pages("1.0")
        announce = index.redis.register_script(ANNOUNCE)
        said = await announce(
            keys=[keys.record, late, late, keys.stream, keys.alive],
            args=[1, "1.0", "", 1, 0, msgspec.msgpack.encode(record("w0")), 1_000, 60_000],
        )
        assert said == b"anew"
        await place.publisher.close()
        del index.places["w0"]
        said = await announce(
            keys=[keys.record, late, late, keys.stream, keys.alive],
            args=[1, "1.0", "", 99, 0, msgspec.msgpack.encode(record("w0")), 1_000, 60_000],
        )
        assert said == b"anew", "a place that has left does not come back"
        await index.settled()


async def test_a_stream_is_bounded_by_its_changes_too(index_settings: IndexSettings) -> None:
    settings = index_settings.model_copy(update={"stream_entries": 1_000})
    async with running(settings) as index:
        place = await index.join("w0")
        for start in range(0, 10_000, 250):
            place.store(*range(start, start + 250))
            assert await place.publisher.flushed(WITHIN_S)
        keys = PlaceKeys(settings.key_prefix, W0)
        assert await index.redis.xlen(keys.stream) <= 6
        await index.settled()


async def test_announcements_that_fail_leave_one_set_of_pages_at_most(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_FILL_PAGES", 10)
    place = RemotePlace(index_settings.url, record("w0"), index_settings)
    client = make_async_client(index_settings.url)
    masks = masks_of(entry(number) for number in range(100))
    for seq in range(1, 6):
        task = asyncio.create_task(place.announce(masks, seq))
        await asyncio.sleep(0.004)
        task.cancel()
        await asyncio.wait([task])
    left = await client.keys(f"{index_settings.key_prefix}:*pages*")
    assert len(left) <= 2, "that of the last, and one whose last command was under way"
    for name in left:
        assert await client.pttl(name) > 0
    assert await place.announce(masks, 6)
    await place.withdraw()
    await place.close()
    await client.aclose()


async def test_a_place_that_nobody_wants_any_more_is_not_read_into_the_mirror(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings) as index:
        await index.join("w0", holding=10)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, W0)
        for with_pages in (True, False):
            mirror = Mirror()
            reader = PlaceReader(index.redis, mirror, limit_s=WITHIN_S, with_pages=with_pages)
            assert await reader.read(keys, lambda: False) is None
            assert mirror.places() == {}
            mirror.check()


async def test_a_place_that_cannot_be_read_is_tried_at_growing_intervals(
    index_settings: IndexSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    async def fail(*_: object) -> None:
        nonlocal reads
        reads += 1
        raise RuntimeError("no")

    async with running(index_settings) as index:
        place = await index.join("w0", holding=10)
        await index.settled()
        mirror = Mirror()
        settings = index_settings.model_copy(update={"poll_s": 0.001})
        feed = MirrorFeed(settings.url, mirror, settings=settings)
        began_s = time.monotonic()
        with monkeypatch.context() as patch:
            patch.setattr(PlaceReader, "read", fail)
            await feed.start()
            for number in range(100, 150):
                place.store(number)
                await asyncio.sleep(0.01)
            await until(lambda: reads >= 2, "read again")
            took_s, least_s, wait_s = time.monotonic() - began_s, 0.0, _FIRST_WAIT_S
            for _ in range(reads - 1):
                # Jitter takes half of a wait at most.
                least_s, wait_s = least_s + wait_s / 2, min(2 * wait_s, _LONGEST_RETRY_S)
            assert least_s <= took_s
        await index.settled(mirror)
        await feed.close()


async def test_a_hint_tells_how_long_leading_runs_are(index_settings: IndexSettings) -> None:
    keys = [entry(number).key for number in range(500)]
    lengths = (0, 1, 2, 11, 12, 13, 14, 100, 143, 145, 499, 500)
    async with running(index_settings) as index:
        for number in lengths:
            await index.join(f"holds-{number}", holding=number)
        await index.settled()
        lookup = DirectLookup(index_settings.url, settings=index_settings)
        try:
            for asked in (keys, keys[:13], keys[:1], []):
                hint = await asyncio.to_thread(lookup.hint, asked)
                assert {place: list(run) for place, run in hint.items()} == {
                    place: list(run) for place, run in index.mirror.matches(asked).items()
                }
        finally:
            lookup.close()

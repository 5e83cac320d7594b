"""Whatever happens to Redis, to places and to readers: in the end the mirror equals what places hold."""

import asyncio
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pie.index.conformance import entry, key
from pie.index.contract import IndexMode
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.names import PlaceKeys
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId, Tier
from tests.index.places import WITHIN_S, Index, running, until

pytestmark = pytest.mark.live


@pytest.fixture
def own_settings(own_redis_server: EmbeddedServer) -> IndexSettings:
    return IndexSettings(
        url=own_redis_server.url, ttl_s=2.0, poll_s=0.05, request_timeout_s=0.5, queue_entries=1_000
    )


@pytest.fixture
def patient_settings(own_settings: IndexSettings) -> IndexSettings:
    """For tests of exact modes: what only answers late is not degraded."""
    return own_settings.model_copy(update={"request_timeout_s": 20.0, "ttl_s": 20.0})


def data_of(server: EmbeddedServer) -> Path:
    return server.log_file.parent / "appendonlydir"


async def test_a_killed_redis_comes_back_with_its_data_and_nobody_announces_anew(
    own_redis_server: EmbeddedServer, patient_settings: IndexSettings
) -> None:
    async with running(patient_settings) as index:
        place = await index.join("w0")
        place.store(*range(100))
        await index.settled()
        own_redis_server.kill()
        place.store(*range(100, 200))
        place.remove(*range(50))
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
        assert index.mirror.matches([key(0)]), "a degraded mirror goes on with what it knows"
        own_redis_server.start()
        await index.settled()
        assert place.snapshots == 1
        assert index.feed.resyncs == 1
        await until(lambda: place.modes[-1] is IndexMode.OK, "ok again")
        assert place.modes[-2:] == [IndexMode.DEGRADED, IndexMode.OK]


async def test_a_redis_that_comes_back_empty_is_rebuilt_from_the_places(
    own_redis_server: EmbeddedServer, patient_settings: IndexSettings
) -> None:
    async with running(patient_settings) as index:
        for name in ("w0", "w1"):
            (await index.join(name)).store(*range(100))
        await index.settled()
        own_redis_server.kill()
        shutil.rmtree(data_of(own_redis_server))
        index.places["w0"].remove(3)
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
        own_redis_server.start()
        await index.settled()
        assert all(place.snapshots > 1 for place in index.places.values())
        degraded = index.modes.index(IndexMode.DEGRADED)
        assert index.modes[degraded:] == [IndexMode.DEGRADED, IndexMode.RESYNCING, IndexMode.OK]


async def test_a_redis_that_goes_back_to_an_older_state_is_corrected(
    own_redis_server: EmbeddedServer, own_settings: IndexSettings, tmp_path: Path
) -> None:
    async with running(own_settings) as index:
        place = await index.join("w0")
        place.store(*range(100))
        await index.settled()
        shutil.copytree(data_of(own_redis_server), tmp_path / "older")
        place.store(*range(100, 200))
        place.remove(*range(50))
        await index.settled()
        own_redis_server.kill()
        shutil.rmtree(data_of(own_redis_server))
        shutil.copytree(tmp_path / "older", data_of(own_redis_server))
        own_redis_server.start()
        await until(lambda: place.snapshots > 1, "announced anew")
        await index.settled()


async def test_after_flushall_places_are_back_within_a_sign_of_life_and_none_is_dropped(
    own_settings: IndexSettings,
) -> None:
    async with running(own_settings.model_copy(update={"ttl_s": 5.0})) as index:
        for name in ("w0", "w1"):
            (await index.join(name)).store(*range(100))
        await index.settled()
        await index.redis.flushall()
        for _ in range(20):
            assert len(index.mirror.places()) == 2
            assert index.mirror.matches([key(5)]).keys() == {"w0", "w1"}
            await asyncio.sleep(0.01)
        await index.settled()
        assert all(place.snapshots > 1 for place in index.places.values())


async def test_flushall_while_places_publish_loses_nothing(own_settings: IndexSettings) -> None:
    async with running(own_settings) as index:
        place = await index.join("w0")
        for number in range(300):
            place.store(number)
            if number % 100 == 50:
                await index.redis.flushall()
            if number % 10 == 0:
                await asyncio.sleep(0.005)
        await index.settled()


async def test_a_redis_that_stands_still_degrades_the_index_and_loses_nothing(
    own_redis_server: EmbeddedServer, own_settings: IndexSettings
) -> None:
    async with running(own_settings) as index:
        place = await index.join("w0")
        place.store(*range(100))
        await index.settled()
        assert own_redis_server.pid is not None
        os.kill(own_redis_server.pid, signal.SIGSTOP)
        try:
            place.store(*range(100, 200))
            # Longer than the place's time to live: it must not be taken for dead all the same.
            for _ in range(35):
                await asyncio.sleep(0.1)
                assert set(index.mirror.places()) == {"w0"}
                assert index.mirror.matches([key(0)])
            await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
            await until(lambda: place.publisher.mode is IndexMode.DEGRADED, "degraded there too")
        finally:
            os.kill(own_redis_server.pid, signal.SIGCONT)
        await index.settled()


async def test_redis_may_come_up_after_places_and_readers(
    own_redis_server: EmbeddedServer, own_settings: IndexSettings
) -> None:
    own_redis_server.stop()
    async with running(own_settings) as index:
        place = await index.join("w0", holding=10)
        place.store(20)
        assert not await index.feed.ready(0.2)
        assert not await place.publisher.flushed(0.2)
        await until(lambda: index.mirror.mode is IndexMode.DEGRADED, "degraded")
        own_redis_server.start()
        assert await place.publisher.flushed(WITHIN_S)
        assert await index.feed.ready(WITHIN_S)
        await index.settled()


async def test_more_changes_than_the_queue_holds_are_announced_anew(
    own_redis_server: EmbeddedServer, own_settings: IndexSettings
) -> None:
    async with running(own_settings) as index:
        place = await index.join("w0")
        await index.settled()
        own_redis_server.kill()
        for number in range(own_settings.queue_entries + 1):
            place.store(number)
        place.remove(7)
        own_redis_server.start()
        await index.settled()
        assert place.snapshots > 1


async def test_a_full_redis_is_a_degraded_one(own_settings: IndexSettings) -> None:
    async with running(own_settings) as index:
        place = await index.join("w0")
        place.store(0)
        await index.settled()
        await index.redis.config_set("maxmemory", 1)
        place.store(*range(1, 50))
        await until(lambda: place.publisher.mode is IndexMode.DEGRADED, "degraded")
        # Longer than a place lives that nobody hears of: what is refused is no sign of death.
        await asyncio.sleep(3 * own_settings.ttl_s)
        assert index.mirror.places().keys() == {PlaceId("w0")}
        await index.redis.config_set("maxmemory", 0)
        await index.settled()


async def test_a_place_says_once_that_it_cannot_publish_and_once_that_it_can_again(
    own_settings: IndexSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with running(own_settings) as index:
        place = await index.join("w0")
        place.store(0)
        await index.settled()
        await index.redis.config_set("maxmemory", 1)
        # More than is kept for later, so that the place must announce itself, again and again.
        place.store(*range(1, 2_000))
        await until(lambda: place.modes.count(IndexMode.DEGRADED) >= 3, "refused three times")
        await index.redis.config_set("maxmemory", 0)
        await index.settled()
        await until(lambda: place.publisher.mode is IndexMode.OK, "published")
    said = [record.message for record in caplog.records if record.message.startswith("w0")]
    assert sum("cannot publish" in message for message in said) == 1
    assert said.count("w0 publishes again") == 1


async def test_a_snapshot_that_raises_is_asked_again(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=5)
        place.fail_snapshots = 2
        await index.settled()
        assert place.snapshots == 3


_KILLED = """
import asyncio, sys
from pie.index.conformance import entry, record
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings

async def main():
    settings = IndexSettings(url=sys.argv[1], key_prefix=sys.argv[2])
    place = Publisher(settings.url, record("gone"), lambda: [entry(0)], settings=settings)
    await place.start()
    await place.flushed(60)
    print("up", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def killed_place(index_settings: IndexSettings) -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", _KILLED, index_settings.url, index_settings.key_prefix]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        yield process
        process.kill()


async def test_a_killed_place_is_gone_when_its_time_is_up_and_leaves_nothing_for_ever(
    index_settings: IndexSettings, killed_place: "subprocess.Popen[bytes]"
) -> None:
    async with running(index_settings) as index:
        await until(lambda: bool(index.mirror.matches([key(0)])), "the place is found")
        killed_place.kill()
        alive = PlaceKeys(index_settings.key_prefix, PlaceId("gone")).alive
        asked_s = time.monotonic()
        left_ms = await index.redis.pttl(alive)
        await until(lambda: not index.mirror.places(), "the place is gone")
        # Redis counts in whole milliseconds, by the clock of the wall.
        assert time.monotonic() - asked_s > left_ms / 1000 - 0.1
        assert index.mirror.matches([key(0)]) == {}
        await until(lambda: index.mirror.mode is IndexMode.OK, "ok")
        left = await index.redis.keys(f"{index_settings.key_prefix}:*")
        for name in left:
            assert 0 < await index.redis.pttl(name) <= 60_000
        members = await index.redis.smembers(f"{index_settings.key_prefix}:places")
        assert not members


async def test_a_closed_place_is_gone_at_once_and_leaves_a_tombstone_alone(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings.model_copy(update={"ttl_s": 20.0})) as index:
        place = await index.join("w0", holding=5)
        await index.settled()
        await place.publisher.close()
        del index.places["w0"]
        await until(lambda: not index.mirror.places(), "gone")
        assert await index.redis.keys(f"{index_settings.key_prefix}:*") == [
            PlaceKeys(index_settings.key_prefix, PlaceId("w0")).record.encode()
        ]


async def test_a_later_start_silences_an_earlier_one(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        before = await index.join("w0", epoch=1, holding=5)
        await index.settled()
        after = await index.join("w0", epoch=2)
        after.store(7)
        before.store(9)
        await until(lambda: before.publisher.fenced, "the earlier start is fenced")
        assert not await before.publisher.flushed(1)
        await index.settled()
        assert index.mirror.epoch(PlaceId("w0")) == 2
        snapshots = after.snapshots
        await before.publisher.close()
        after.store(8)
        await index.settled()
        assert after.snapshots == snapshots, (
            "closing a fenced place does not withdraw the later one"
        )


async def test_an_earlier_start_cannot_announce_itself(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        await index.join("w0", epoch=2**63)
        await index.settled()
        other = Index(index_settings)
        before = await other.join("w0", epoch=2**63 - 1, holding=3)
        await until(lambda: before.publisher.fenced, "fenced")
        await index.settled()
        await before.publisher.close()
        await other.redis.aclose()
        await index.settled()
        assert index.mirror.epoch(PlaceId("w0")) == 2**63


async def test_a_reader_that_starts_late_reads_all_while_places_go_on(
    index_settings: IndexSettings,
) -> None:
    async with running(index_settings) as index:
        places = [await index.join(f"w{number}", holding=2_500) for number in range(3)]
        await index.settled()
        mirror = Mirror()
        late = index.new_feed(mirror)
        await late.start()
        for number in range(500):
            place = places[number % 3]
            place.store(10_000 + number)
            place.remove(number)
            if number % 10 == 0:
                await asyncio.sleep(0.002)
        assert await late.ready(WITHIN_S)
        await index.settled(mirror)
        await late.close()
        assert mirror.mode is IndexMode.DEGRADED


class SlowFeed(MirrorFeed):
    """A feed that reads events only while its gate is open."""

    gate: asyncio.Event

    async def _read_events(self, wait_s: float) -> None:
        await self.gate.wait()
        await super()._read_events(wait_s)


async def test_a_reader_that_falls_behind_the_stream_reads_the_place_anew(
    index_settings: IndexSettings,
) -> None:
    settings = index_settings.model_copy(update={"stream_events": 10})
    async with running(settings) as index:
        place = await index.join("w0")
        mirror = Mirror()
        slow = SlowFeed(settings.url, mirror, settings=settings)
        slow.gate = asyncio.Event()
        slow.gate.set()
        await slow.start()
        place.store(0)
        await index.settled(mirror)
        assert slow.gaps == 0
        slow.gate.clear()
        # Redis trims a stream by whole nodes of a hundred events.
        for number in range(250):
            place.store(number)
            await place.publisher.flushed(WITHIN_S)
        place.remove(0)
        assert await place.publisher.flushed(WITHIN_S)
        assert mirror.masks(place.name).keys() <= {key(0)}
        slow.gate.set()
        await index.settled(mirror)
        assert slow.gaps > 0
        await slow.close()


@pytest.mark.parametrize("later", [1, 2, 10**9])
async def test_a_stream_that_somebody_else_has_written_to_is_begun_anew(
    index_settings: IndexSettings, later: int
) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0")
        place.store(0)
        await index.settled()
        keys = PlaceKeys(index_settings.key_prefix, PlaceId("w0"))
        seq = int(await index.redis.hget(keys.record, "seq") or 0)
        await index.redis.xadd(keys.stream, {"event": b"\xff"}, id=f"1-{seq + later}")
        for number in range(10):
            place.store(number)
            await place.publisher.flushed(WITHIN_S)
        await index.settled()


async def test_a_place_of_another_version_is_left_out(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        await index.join("w0", holding=1)
        keys = PlaceKeys(index_settings.key_prefix, PlaceId("w9"))
        for name, value in {"epoch": "1", "record": "?", "generation": "1.1", "seq": "1"}.items():
            await index.redis.hset(keys.record, name, value)
        await index.redis.sadd(f"{index_settings.key_prefix}:places", "w9")
        await index.settled()


async def test_a_reader_of_places_alone_keeps_no_pages(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0", holding=100)
        mirror = Mirror()
        feed = MirrorFeed(index_settings.url, mirror, settings=index_settings, with_pages=False)
        await feed.start()
        await until(lambda: set(mirror.places()) == {"w0"}, "the place is up")
        place.store(500)
        await index.settled()
        assert mirror.masks(place.name) == {}
        again = await index.join("w0", epoch=2)
        await until(lambda: mirror.epoch(again.name) == 2, "the later start is seen")
        await place.publisher.close()
        await again.publisher.close()
        del index.places["w0"]
        await until(lambda: not mirror.places(), "the place is gone")
        await feed.close()


async def test_changes_may_come_from_any_thread(index_settings: IndexSettings) -> None:
    async with running(index_settings) as index:
        place = await index.join("w0")

        def work(base: int) -> None:
            for number in range(base, base + 200):
                entries = [entry(number)]
                place.table.update(entries)
                place.publisher.stored(entries)

        await asyncio.gather(*(asyncio.to_thread(work, base) for base in (0, 1_000, 2_000)))
        assert await place.publisher.flushed(WITHIN_S)
        await index.settled()


@pytest.mark.parametrize("seed", range(3))
async def test_any_mixture_of_faults_ends_in_agreement(
    own_redis_server: EmbeddedServer, own_settings: IndexSettings, seed: int
) -> None:
    chance = random.Random(seed)
    epochs = {"w0": 1, "w1": 1, "w2": 1}
    async with running(own_settings) as index:
        for name in epochs:
            await index.join(name)
        for step in range(250):
            place = index.places[chance.choice(list(index.places))]
            numbers = chance.sample(range(300), 20)
            if chance.random() < 0.7:
                place.store(*numbers, tier=chance.choice([Tier.DEVICE, Tier.HOST]))
            else:
                place.remove(*numbers, tier=chance.choice([Tier.DEVICE, Tier.HOST]))
            await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
            if step % 50 == 25:
                await fault(chance, index, own_redis_server, epochs)
        own_redis_server.start()
        await index.settled()


async def fault(
    chance: random.Random, index: Index, server: EmbeddedServer, epochs: dict[str, int]
) -> None:
    """Let one thing go wrong."""
    kind = chance.choice(["kill", "empty", "flush", "restart", "clear"])
    if kind == "flush":
        server.start()
        await index.redis.flushall()
    elif kind in {"kill", "empty"}:
        server.kill()
        if kind == "empty":
            shutil.rmtree(data_of(server), ignore_errors=True)
        await asyncio.sleep(chance.choice([0, 0.3, 1.5]))
        await asyncio.to_thread(server.start)
    else:
        name = chance.choice(list(epochs))
        if kind == "clear":
            index.places[name].clear()
        else:
            before = index.places[name]
            epochs[name] += 1
            await index.join(name, epochs[name], holding=chance.randrange(100))
            if chance.random() < 0.5:
                await before.publisher.close()
            else:
                await until(lambda: before.publisher.fenced, "fenced")
                await before.publisher.close()

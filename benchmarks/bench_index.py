"""What a router asks of the index, and what the index costs.

Keys and the longest match of a long prompt among many places, a direct look-up in Redis as a hint and
exact, how fast events go into a mirror, how long a router that starts anew needs to know a million
pages, and when two routers know of a page that was stored or removed. Redis is the server that Pie brings
along; all but that and the two routers' mirrors runs in this process, on one core.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from pie.index.contract import PlaceRecord
from pie.index.feed import MirrorFeed
from pie.index.lookup import DirectLookup
from pie.index.mirror import Mirror
from pie.index.publisher import Publisher
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import (
    Epoch,
    PageEntry,
    PageStored,
    Part,
    PlaceId,
    PlaceKind,
    Tier,
    part_bit,
)
from pie.page.key import PageKey, RootKey, model_root, page_keys

PAGE_TOKENS = 16
PROMPT_TOKENS = 32_768
PLACES = 64
PAGES = 1_000_000
EVENT_PAGES = 64
ROUNDS = 200
CHANGES = 200
BUSY_PAGES_PER_S = 10_000
ROOT = model_root(fingerprint=b"bench", dtype="float32", page_tokens=PAGE_TOKENS, layout_id="bench")
MASK = part_bit(Part.FULL, Tier.DEVICE)


def run() -> dict[str, object]:
    """Return milliseconds, microseconds and rates, as their names say."""
    return {
        "page_tokens": PAGE_TOKENS,
        "match": _match(),
        "events_pages_per_s": _events(),
        "redis": uvloop.run(_redis()),
        "two_routers": uvloop.run(_two_routers()),
    }


def _match() -> dict[str, object]:
    """Time keys and matches in a mirror of a million pages at 64 places."""
    prompt = _tokens(PROMPT_TOKENS, seed=1)
    keys = page_keys(ROOT, prompt, PAGE_TOKENS)
    mirror = Mirror()
    each = PAGES // PLACES
    for number in range(PLACES):
        # Each place holds another leading part of the prompt, and strangers.
        held = keys[: len(keys) * (number + 1) // PLACES]
        _fill(mirror, _record(number), [*held, *_strangers(number, each - len(held))])

    few = Mirror()
    for number in range(8):
        _fill(few, _record(number), [*keys[:24], *_strangers(number, 10_000)])

    hashing_ms = _median_ms(lambda: page_keys(ROOT, prompt, PAGE_TOKENS))
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "places": PLACES,
        "pages": PAGES,
        "keys_and_match_ms": _median_ms(
            lambda: mirror.matches(page_keys(ROOT, prompt, PAGE_TOKENS))
        ),
        "match_ms": _median_ms(lambda: mirror.matches(keys)),
        "hashing_ns_per_token": round(hashing_ms * 1e6 / PROMPT_TOKENS, 1),
        "match_24_pages_8_places_us": round(_median_ms(lambda: few.matches(keys[:24])) * 1e3, 1),
    }


def _events() -> int:
    """Return how many pages a second a mirror takes in from events."""
    mirror = Mirror()
    mirror.place_up(_record(0))
    events = [
        PageStored(
            PlaceId("place-0"),
            Epoch(1),
            number + 1,
            tuple(
                PageEntry(key, RootKey(ROOT), 0, Part.FULL, Tier.DEVICE, 64)
                for key in _strangers(number, EVENT_PAGES)
            ),
        )
        for number in range(200_000 // EVENT_PAGES)
    ]
    began_s = time.perf_counter()
    for event in events:
        mirror.apply(event)
    took_s = time.perf_counter() - began_s
    return round(len(events) * EVENT_PAGES / took_s)


async def _redis() -> dict[str, object]:
    """Time look-ups at eight places, and a mirror that reads a million pages."""
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-"))
    server = EmbeddedServer(folder / "index", persist=False, memory_budget_bytes=2 << 30)
    try:
        settings = IndexSettings(url=server.start(), ttl_s=60.0)
        keys = page_keys(ROOT, _tokens(PROMPT_TOKENS, seed=1), PAGE_TOKENS)
        publishers = [
            _publisher(
                settings,
                _record(number, settings.ttl_s),
                [*keys[: len(keys) * (number + 1) // 8], *_strangers(number, PAGES // 8 - 2048)],
            )
            for number in range(8)
        ]
        for publisher in publishers:
            await publisher.start()
            await publisher.flushed(120.0)
        mirror = Mirror()
        began_s = time.perf_counter()
        feed = MirrorFeed(settings.url, mirror, settings=settings)
        await feed.start()
        assert await feed.ready(120.0)
        restart_s = time.perf_counter() - began_s
        assert len(mirror.matches(keys)) == 8
        pages = sum(sum(mirror.pages(place).values()) for place in mirror.places())
        lookup = DirectLookup(settings.url, settings=settings)
        hint_ms = _median_ms(lambda: lookup.hint(keys))
        exact_ms = _median_ms(lambda: lookup.matches(keys), rounds=20)
        lookup.close()
        await feed.close()
        for publisher in publishers:
            await publisher.close()
        return {
            "lookup_keys": len(keys),
            "lookup_places": 8,
            "lookup_hint_ms": hint_ms,
            "lookup_exact_ms": exact_ms,
            "restart_pages": pages,
            "restart_s": round(restart_s, 2),
        }
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _two_routers() -> dict[str, object]:
    """Time when the mirrors of two processes have a change, while another place is busy."""
    folder = Path(tempfile.mkdtemp(prefix="pie-bench-"))
    server = EmbeddedServer(folder / "index", persist=False)
    spawn = multiprocessing.get_context("spawn")
    try:
        settings = IndexSettings(url=server.start())
        page = PageEntry(_strangers(0, 1)[0], RootKey(ROOT), 0, Part.FULL, Tier.DEVICE, 64)
        place = _publisher(settings, _record(0), [])
        busy = _publisher(settings, _record(1), [])
        pipes = [spawn.Pipe() for _ in range(2)]
        routers = [
            spawn.Process(target=_watch, args=(settings.url, page.key, there)) for _, there in pipes
        ]
        for publisher in (place, busy):
            await publisher.start()
            await publisher.flushed(30.0)
        for router, (_, there) in zip(routers, pipes, strict=True):
            router.start()
            there.close()  # Theirs alone, so that one that fails is not waited for.
        for here, _ in pipes:
            await _told(here)
        noise = asyncio.create_task(_be_busy(busy))
        apart_ms: list[float] = []
        known_ms: list[float] = []
        draw = random.Random(1)
        for number in range(CHANGES):
            await asyncio.sleep(draw.uniform(0.0, 0.04))
            changed_s = time.monotonic()
            (place.removed if number % 2 else place.stored)([page])
            seen_s = [await _told(here) for here, _ in pipes]
            apart_ms.append(abs(seen_s[0] - seen_s[1]) * 1e3)
            known_ms.append((max(seen_s) - changed_s) * 1e3)
        noise.cancel()
        for router in routers:
            router.join()
        for publisher in (place, busy):
            await publisher.close()
        return {
            "changes": CHANGES,
            "other_pages_per_s": BUSY_PAGES_PER_S,
            "apart_ms_median": round(statistics.median(apart_ms), 2),
            "apart_ms_99": round(statistics.quantiles(apart_ms, n=100)[98], 2),
            "apart_ms_most": round(max(apart_ms), 2),
            "known_to_both_ms_median": round(statistics.median(known_ms), 2),
            "known_to_both_ms_most": round(max(known_ms), 2),
        }
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _told(here: Connection) -> float:
    """Return what a router's process says next."""
    assert await asyncio.to_thread(here.poll, 30.0), "a router's process does not answer"
    said: float = here.recv()
    return said


async def _be_busy(publisher: Publisher) -> None:
    for number in range(1_000_000):
        some = [
            PageEntry(key, RootKey(ROOT), 0, Part.FULL, Tier.DEVICE, 64)
            for key in _strangers(number % 100 + 100, BUSY_PAGES_PER_S // 100)
        ]
        (publisher.removed if number // 100 % 2 else publisher.stored)(some)
        await asyncio.sleep(0.01)


def _watch(url: str, key: PageKey, there: Connection) -> None:
    """Be a router that looks at one page all the time; tell when it came and went."""
    uvloop.run(_watched(url, key, there))


async def _watched(url: str, key: PageKey, there: Connection) -> None:
    mirror = Mirror()
    feed = MirrorFeed(url, mirror)
    await feed.start()
    assert await feed.ready(30.0)
    there.send(time.monotonic())
    seen = 0
    while seen < CHANGES:
        if bool(mirror.matches([key])) is (seen % 2 == 0):
            seen += 1
            there.send(time.monotonic())
        await asyncio.sleep(0.0005)
    await feed.close()


def _publisher(settings: IndexSettings, record: PlaceRecord, keys: Sequence[PageKey]) -> Publisher:
    entries = [PageEntry(key, RootKey(ROOT), 0, Part.FULL, Tier.DEVICE, 64) for key in keys]
    return Publisher(settings.url, record, lambda: entries, settings=settings)


def _record(number: int, ttl_s: float = 5.0) -> PlaceRecord:
    return PlaceRecord(
        place=PlaceId(f"place-{number}"),
        epoch=Epoch(1),
        kind=PlaceKind.WORKER,
        address="tcp://127.0.0.1:1",
        model_root=ROOT,
        page_tokens=PAGE_TOKENS,
        ttl_s=ttl_s,
    )


def _fill(mirror: Mirror, record: PlaceRecord, keys: Iterable[PageKey]) -> None:
    load = mirror.load(record, seq=0)
    load.put((key, MASK) for key in keys)
    assert load.commit()


def _tokens(count: int, *, seed: int) -> array[int]:
    draw = random.Random(seed)
    return array("I", (draw.randrange(49_152) for _ in range(count)))


def _strangers(number: int, count: int) -> list[PageKey]:
    """Return keys that nobody else has."""
    draw = random.Random(number + 1_000_003)
    return [PageKey(draw.randbytes(32)) for _ in range(count)]


def _median_ms(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    times_ms = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        work()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    return round(statistics.median(times_ms), 4)

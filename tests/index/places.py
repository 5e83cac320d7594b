"""Places and readers for tests of the index through a real Redis."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from pie.index.client import make_async_client
from pie.index.conformance import entry, record
from pie.index.contract import IndexMode
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import PageEntry, PartMask, PlaceId, Tier, entry_masks
from pie.page.key import PageKey

WITHIN_S = 60.0
"""Longest wait for anything here; only a failing test waits so long."""


async def until(true: Callable[[], bool], what: str, within_s: float = WITHIN_S) -> None:
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not in time: {what}"
        await asyncio.sleep(0.01)


class Place:
    """A place with a table of pages, which it publishes."""

    def __init__(self, settings: IndexSettings, name: str, epoch: int = 1) -> None:
        self.name = PlaceId(name)
        self.table: set[PageEntry] = set()
        self.modes: list[IndexMode] = []
        self.snapshots = 0
        self.fail_snapshots = 0
        self.publisher = Publisher(
            settings.url,
            record(name, epoch, settings.ttl_s),
            self._snapshot,
            settings=settings,
            on_mode=self.modes.append,
        )

    def _snapshot(self) -> list[PageEntry]:
        self.snapshots += 1
        if self.fail_snapshots:
            self.fail_snapshots -= 1
            raise RuntimeError("no snapshot now")
        return list(self.table)

    def store(self, *numbers: int, tier: Tier = Tier.DEVICE) -> None:
        entries = [entry(number, tier=tier) for number in numbers]
        self.table.update(entries)
        self.publisher.stored(entries)

    def remove(self, *numbers: int, tier: Tier = Tier.DEVICE) -> None:
        entries = [entry(number, tier=tier) for number in numbers]
        self.table.difference_update(entries)
        self.publisher.removed(entries)

    def clear(self) -> None:
        self.table.clear()
        self.publisher.cleared()

    def masks(self) -> dict[PageKey, PartMask]:
        masks: dict[PageKey, PartMask] = {}
        for key, mask in entry_masks(self.table):
            masks[key] = PartMask(masks.get(key, 0) | mask)
        return masks


class Index:
    """One reader, any number of places, and the Redis between them."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self.mirror = Mirror()
        self.modes: list[IndexMode] = []
        self.feed = self.new_feed(self.mirror)
        self.places: dict[str, Place] = {}
        self.redis = make_async_client(settings.url)

    def new_feed(self, mirror: Mirror) -> MirrorFeed:
        return MirrorFeed(
            self.settings.url, mirror, settings=self.settings, on_mode=self.modes.append
        )

    async def join(self, name: str, epoch: int = 1, *, holding: int = 0) -> Place:
        place = Place(self.settings, name, epoch)
        place.table.update(entry(number) for number in range(holding))
        await place.publisher.start()
        self.places[name] = place
        return place

    def agrees(self, mirror: Mirror | None = None) -> bool:
        """Say whether the mirror is the union of what the places hold."""
        mirror = mirror if mirror is not None else self.mirror
        return (
            mirror.mode is IndexMode.OK
            and set(mirror.places()) == {place.name for place in self.places.values()}
            and all(mirror.masks(place.name) == place.masks() for place in self.places.values())
        )

    async def settled(self, mirror: Mirror | None = None) -> None:
        await until(lambda: self.agrees(mirror), "the mirror equals what the places hold")
        (mirror if mirror is not None else self.mirror).check()


@contextlib.asynccontextmanager
async def running(settings: IndexSettings) -> AsyncIterator[Index]:
    index = Index(settings)
    await index.feed.start()
    try:
        yield index
    finally:
        for place in index.places.values():
            await place.publisher.close()
        await index.feed.close()
        await index.redis.aclose()
    index.mirror.check()

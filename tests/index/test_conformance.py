"""Every implementation of the index passes the shipped suite."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import pytest

from pie.index.conformance import IndexConformance
from pie.index.contract import IndexReader, PlaceRecord
from pie.index.feed import MirrorFeed
from pie.index.lookup import DirectLookup
from pie.index.mirror import Mirror
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import PageEntry, PageRemoved, PageStored, PlaceCleared
from tests.index.places import WITHIN_S

Snapshot = Callable[[], Iterable[PageEntry]]


class DirectPlace:
    """Applies its events to a mirror at once."""

    def __init__(self, mirror: Mirror, record: PlaceRecord, held: Iterable[PageEntry]) -> None:
        self._mirror = mirror
        self._at = (record.place, record.epoch)
        self._seq = itertools.count(1)
        mirror.place_up(record)
        self.stored(list(held))

    def stored(self, entries: Sequence[PageEntry]) -> None:
        self._mirror.apply(PageStored(*self._at, next(self._seq), tuple(entries)))

    def removed(self, entries: Sequence[PageEntry]) -> None:
        self._mirror.apply(PageRemoved(*self._at, next(self._seq), tuple(entries)))

    def cleared(self) -> None:
        self._mirror.apply(PlaceCleared(*self._at, next(self._seq)))

    async def leave(self) -> None:
        self._mirror.place_down(*self._at)


class DirectIndex:
    def __init__(self) -> None:
        self.reader = Mirror()

    async def join(self, record: PlaceRecord, snapshot: Snapshot) -> DirectPlace:
        return DirectPlace(self.reader, record, snapshot())

    async def settle(self) -> None:
        self.reader.check()


class TestMirrorFedDirectly(IndexConformance):
    @asynccontextmanager
    async def index(self) -> AsyncIterator[DirectIndex]:
        index = DirectIndex()
        yield index
        while index.reader.tidy(7):
            index.reader.check()


class RedisPlace(Publisher):
    """A publisher as the suite wants it: it remembers what it would announce."""

    async def leave(self) -> None:
        await self.close()


class RedisIndex:
    """Publishers in front of a reader; settles when the reader agrees with what was published."""

    def __init__(self, reader: IndexReader, settings: IndexSettings) -> None:
        self.reader = reader
        self.settings = settings
        self.places: list[RedisPlace] = []

    async def join(self, record: PlaceRecord, snapshot: Snapshot) -> RedisPlace:
        place = RedisPlace(self.settings.url, record, snapshot, settings=self.settings)
        await place.start()
        assert await place.flushed(WITHIN_S)
        self.places.append(place)
        return place

    async def settle(self) -> None:
        for place in self.places:
            assert (
                place.fenced or place._task is None or await place.flushed(WITHIN_S) or place.fenced
            )

    async def close(self) -> None:
        for place in self.places:
            await place.close()


@pytest.mark.live
class TestDirectLookup(IndexConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, index_settings: IndexSettings) -> None:
        self.settings = index_settings

    @asynccontextmanager
    async def index(self) -> AsyncIterator[RedisIndex]:
        lookup = DirectLookup(self.settings.url, settings=self.settings)
        index = RedisIndex(lookup, self.settings)
        yield index
        await index.close()
        assert lookup.places() == {}
        lookup.close()


class FedIndex(RedisIndex):
    """Settles when the mirror has every place's latest event."""

    def __init__(self, mirror: Mirror, settings: IndexSettings) -> None:
        super().__init__(mirror, settings)
        self.mirror = mirror
        self.exact = DirectLookup(settings.url, settings=settings)

    async def settle(self) -> None:
        await super().settle()
        deadline_s = time.monotonic() + WITHIN_S
        while not self._agrees():
            assert time.monotonic() < deadline_s, "the mirror does not get there"
            await asyncio.sleep(0.01)
        self.mirror.check()

    def _agrees(self) -> bool:
        places = self.exact.places()
        return (
            self.mirror.mode.value == "ok"
            and self.mirror.places() == places
            and all(self.mirror.pages(place) == self.exact.pages(place) for place in places)
        )


@pytest.mark.live
class TestMirrorFedThroughRedis(IndexConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, index_settings: IndexSettings) -> None:
        self.settings = index_settings

    @asynccontextmanager
    async def index(self) -> AsyncIterator[FedIndex]:
        mirror = Mirror()
        feed = MirrorFeed(self.settings.url, mirror, settings=self.settings)
        await feed.start()
        index = FedIndex(mirror, self.settings)
        yield index
        await index.close()
        await feed.close()
        index.exact.close()
        mirror.check()

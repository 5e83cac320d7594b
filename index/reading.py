"""Reading one place from Redis as a whole.

Covers what a place's record and events look like, and a consistent copy of its pages. Does not cover
when that is done (`pie.index.feed`).

The pages are scanned while they change, so that the scan alone is a mixture of moments. Every change
since the scan began is in the stream, and applying a change twice does no harm: after all events up to
the scan's end the copy is what Redis had then.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import msgspec
import redis.asyncio

from pie.index.client import asking, is_strange, raise_others
from pie.index.contract import PlaceRecord
from pie.index.errors import IndexStrangeError
from pie.index.lanes import MASK_BITS
from pie.index.mirror import Applied, Mirror, PlaceLoad
from pie.index.names import PlaceKeys, stream_id
from pie.page.events import PageEvent, PartMask
from pie.page.key import KEY_BYTES, PageKey

log = logging.getLogger("pie.index.reading")

_SCAN_PAGES = 1_000
"""Pages in one step of a scan; Redis works on them for about a millisecond, and so do we."""

PLACES_AT_ONCE = 128
"""Places that are asked about in one go, which takes both sides some milliseconds."""

_EVENTS_AT_ONCE = 32
"""Events in one answer, of 256 entries at most, which Redis and we handle in some milliseconds."""

_ATTEMPTS = 3
"""Tries to catch up with a place whose stream is shorter than the time that a scan takes."""

_LARGEST = 2**63 - 1
"""Number of an event, so that there is one after it."""

_MOST_TTL_S = 86_400.0
"""Longer than any place says to live without a sign of life, and a time that Redis takes."""

_RECORD = msgspec.msgpack.Decoder(PlaceRecord)
_EVENT = msgspec.msgpack.Decoder(PageEvent)


class Announced(enum.Enum):
    """What Redis has of a place that is not up."""

    NOTHING = "nothing"
    COMING = "coming"
    """It is alive and writes what it holds."""
    WITHDRAWN = "withdrawn"
    """It has left, or a later start of it is on its way."""
    UNREADABLE = "unreadable"
    """Something that this version does not understand."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What Redis has of a place that is up."""

    FIELDS: ClassVar[Sequence[str]] = ("epoch", "record", "generation", "seq")

    record: PlaceRecord
    generation: str
    """Names this announcement; another one means that all has to be read."""
    seq: int
    """The latest event that the pages contain."""


def parse_announcement(
    fields: Sequence[bytes | None], alive: bytes | None
) -> Announcement | Announced:
    """Return what Redis says of a place.

    `fields` are those of its record, in the order of `Announcement.FIELDS`; `alive` is the epoch that
    was heard of last, None where that is too long ago.
    """
    epoch, record, generation, seq = fields
    if epoch is not None and (record is None or generation is None or seq is None):
        return Announced.WITHDRAWN
    if alive is None:
        return Announced.NOTHING
    if epoch is None:
        return Announced.COMING
    if alive != epoch:
        return Announced.WITHDRAWN
    return parse_record(fields)


def parse_record(fields: Sequence[bytes | None]) -> Announcement | Announced:
    """Return what a place has announced, whether or not it was heard of since."""
    epoch, record, generation, seq = fields
    if record is None or generation is None or seq is None:
        return Announced.NOTHING
    try:
        found = Announcement(_RECORD.decode(record), generation.decode(), int(seq))
    except (msgspec.DecodeError, ValueError):
        return Announced.UNREADABLE
    # Nor does it live for no time, or for ever.
    if not 0 < found.record.ttl_s <= _MOST_TTL_S:
        return Announced.UNREADABLE
    # A name that Redis takes for no event of this start would break reading all other places.
    if not seq.isdigit() or found.seq > _LARGEST or epoch != b"%d" % found.record.epoch:
        return Announced.UNREADABLE
    return found


def parse_masks(found: Mapping[bytes, bytes]) -> Iterator[tuple[PageKey, PartMask]]:
    """Yield what a place holds of each page; what no place would have written is left out."""
    for key, said in found.items():
        if len(key) == KEY_BYTES and said.isdigit() and 0 < (mask := int(said)) < 1 << MASK_BITS:
            yield PageKey(key), PartMask(mask)


def parse_event(fields: Mapping[bytes, bytes]) -> PageEvent | None:
    """Return the event in a stream's entry; None for an announcement or what is not understood."""
    raw = fields.get(b"event")
    if raw is None:
        return None
    try:
        return _EVENT.decode(raw)
    except msgspec.DecodeError:
        return None


async def ask_places(
    client: redis.asyncio.Redis, places: Sequence[PlaceKeys], limit_s: float
) -> list[tuple[Announcement | Announced, int]]:
    """Return what Redis has of each place, and for how many ms it counts as alive.

    Raises:
        IndexUnavailableError: Redis did not answer about some of them within `limit_s`.
    """
    found: list[tuple[Announcement | Announced, int]] = []
    for at in range(0, len(places), PLACES_AT_ONCE):
        async with asking(limit_s), client.pipeline(transaction=False) as pipe:
            for keys in places[at : at + PLACES_AT_ONCE]:
                pipe.hmget(keys.record, Announcement.FIELDS)
                pipe.get(keys.alive)
                pipe.pttl(keys.alive)
            answers = await pipe.execute(raise_on_error=False)
            raise_others(answers)
        found += [
            (
                Announced.UNREADABLE
                if is_strange(fields) or is_strange(alive)
                else parse_announcement(fields, alive),
                ttl_ms,
            )
            for fields, alive, ttl_ms in zip(
                answers[::3], answers[1::3], answers[2::3], strict=True
            )
        ]
    return found


class PlaceReader:
    """Reads places from Redis into a mirror."""

    def __init__(
        self, client: redis.asyncio.Redis, mirror: Mirror, *, limit_s: float, with_pages: bool
    ) -> None:
        self._client = client
        self._mirror = mirror
        self._limit_s = limit_s
        self._with_pages = with_pages

    async def read(
        self, keys: PlaceKeys, wanted: Callable[[], bool]
    ) -> tuple[Announcement, int] | None:
        """Read a place into the mirror, if that is still `wanted` when it has been read.

        Returns its announcement and the latest event that the mirror has now, or None where the
        place is not up or changes faster than it can be read; the mirror then is as it was.

        Raises:
            IndexUnavailableError: Redis does not answer.
        """
        attempts = 0
        while (found := await self._announcement(keys)) is not None and attempts < _ATTEMPTS:
            attempts += 1
            if not self._with_pages:
                return (
                    (found, found.seq) if wanted() and self._mirror.place_up(found.record) else None
                )
            load = self._mirror.load(found.record, seq=found.seq)
            try:
                await self._check_stream(keys)
                await self._scan(keys.pages(found.generation), load)
                now = await self._announcement(keys)
                if now is None or now.generation != found.generation:
                    continue
                if await self._catch_up(keys, load, now):
                    return (found, load.seq) if wanted() and load.commit() else None
            finally:
                load.discard()
        if found is not None:
            log.warning("place %s changes faster than it can be read", found.record.place)
        return None

    async def _announcement(self, keys: PlaceKeys) -> Announcement | None:
        async with asking(self._limit_s):
            fields = await self._client.hmget(keys.record, list(Announcement.FIELDS))
        said = parse_record([f if isinstance(f, bytes) else None for f in fields])
        return said if isinstance(said, Announcement) else None

    async def _check_stream(self, keys: PlaceKeys) -> None:
        """Hold the place's stream to be one: all places that are followed are asked for at once.

        Raises:
            IndexStrangeError: It is something else.
        """
        async with asking(self._limit_s):
            kind = await self._client.type(keys.stream)
        if kind not in (b"stream", b"none"):
            raise IndexStrangeError(f"{keys.stream} holds no stream")

    async def _scan(self, pages: str, load: PlaceLoad) -> None:
        """Read all pages, in the state of some moment each."""
        cursor = 0
        while True:
            async with asking(self._limit_s):
                cursor, found = await self._client.hscan(pages, cursor, count=_SCAN_PAGES)
            # The client's types cover both of its protocols and what it may decode.
            masks = cast("Mapping[bytes, bytes]", found)
            load.put(parse_masks(masks))
            if cursor == 0:
                return

    async def _catch_up(self, keys: PlaceKeys, load: PlaceLoad, until: Announcement) -> bool:
        """Apply the events since the scan began; False where some are not there any more."""
        epoch = until.record.epoch
        while load.seq < until.seq:
            after = stream_id(epoch, load.seq)
            async with asking(self._limit_s):
                entries = await self._client.xrange(
                    keys.stream, min=f"({after}", count=_EVENTS_AT_ONCE
                )
            if not entries:
                return False
            for _, fields in entries:
                event = parse_event(cast("Mapping[bytes, bytes]", fields))
                if event is None or load.apply(event) is not Applied.DONE:
                    return False
            await asyncio.sleep(0)
        return True

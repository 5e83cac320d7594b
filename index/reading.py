"""Reading one place from Redis as a whole.

Covers what a place's record and events look like, and a consistent copy of its pages. Does not cover
when that is done (`pie.index.feed`).

The pages are scanned while they change, so that the scan alone is a mixture of moments. Every change
since the scan began is in the stream, and applying a change twice does no harm: after all events up to
the scan's end the copy is what Redis had then.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import msgspec
import redis.asyncio

from pie.index.client import translated
from pie.index.contract import PlaceRecord
from pie.index.mirror import Applied, Mirror, PlaceLoad
from pie.index.names import PlaceKeys, stream_id
from pie.page.events import PageEvent, PartMask
from pie.page.key import PageKey

log = logging.getLogger("pie.index.reading")

_SCAN_PAGES = 1_000
"""Pages in one step of a scan; Redis works on them for about a millisecond, and so do we."""

_EVENTS_AT_ONCE = 128

_ATTEMPTS = 3
"""Tries to catch up with a place whose stream is shorter than the time that a scan takes."""

_RECORD = msgspec.msgpack.Decoder(PlaceRecord)
_EVENT = msgspec.msgpack.Decoder(PageEvent)


class Announced(enum.Enum):
    """What Redis has of a place that is not up."""

    NOTHING = "nothing"
    WITHDRAWN = "withdrawn"
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


def parse_announcement(fields: Sequence[bytes | None]) -> Announcement | Announced:
    """Return what the fields of a place's record say, in the order of `Announcement.FIELDS`."""
    epoch, record, generation, seq = fields
    if epoch is None:
        return Announced.NOTHING
    if record is None or generation is None or seq is None:
        return Announced.WITHDRAWN
    try:
        return Announcement(_RECORD.decode(record), generation.decode(), int(seq))
    except (msgspec.DecodeError, ValueError):
        return Announced.UNREADABLE


def parse_event(fields: Mapping[bytes, bytes]) -> PageEvent | None:
    """Return the event in a stream's entry; None for an announcement or what is not understood."""
    raw = fields.get(b"event")
    if raw is None:
        return None
    try:
        return _EVENT.decode(raw)
    except msgspec.DecodeError:
        return None


async def read_place(
    client: redis.asyncio.Redis, mirror: Mirror, keys: PlaceKeys, *, with_pages: bool
) -> tuple[Announcement, int] | None:
    """Read a place into the mirror.

    Returns its announcement and the latest event that the mirror has now, or None where the place is
    not up or changes faster than it can be read; the mirror then is as it was.

    Raises:
        IndexUnavailableError: Redis does not answer.
    """
    attempts = 0
    while (found := await _announcement(client, keys)) is not None and attempts < _ATTEMPTS:
        attempts += 1
        if not with_pages:
            return (found, found.seq) if mirror.place_up(found.record) else None
        load = mirror.load(found.record, seq=found.seq)
        try:
            with translated():
                await _scan(client, keys.pages(found.generation), load)
            now = await _announcement(client, keys)
            if now is None or now.generation != found.generation:
                continue
            with translated():
                caught_up = await _catch_up(client, keys, load, now)
            if caught_up:
                return (found, load.seq) if load.commit() else None
        finally:
            load.discard()
    if found is not None:
        log.warning("place %s changes faster than it can be read", found.record.place)
    return None


async def _announcement(client: redis.asyncio.Redis, keys: PlaceKeys) -> Announcement | None:
    with translated():
        fields = await client.hmget(keys.record, list(Announcement.FIELDS))
    said = parse_announcement([f if isinstance(f, bytes) else None for f in fields])
    return said if isinstance(said, Announcement) else None


async def _scan(client: redis.asyncio.Redis, pages: str, load: PlaceLoad) -> None:
    """Read all pages, in the state of some moment each."""
    cursor = 0
    while True:
        cursor, found = await client.hscan(pages, cursor, count=_SCAN_PAGES)
        # The client's types cover both of its protocols and what it may decode.
        masks = cast("Mapping[bytes, bytes]", found)
        load.put((PageKey(key), PartMask(int(mask))) for key, mask in masks.items())
        if cursor == 0:
            return


async def _catch_up(
    client: redis.asyncio.Redis, keys: PlaceKeys, load: PlaceLoad, until: Announcement
) -> bool:
    """Apply the events since the scan began; False where some are not there any more."""
    epoch = until.record.epoch
    while load.seq < until.seq:
        after = stream_id(epoch, load.seq)
        entries = await client.xrange(keys.stream, min=f"({after}", count=_EVENTS_AT_ONCE)
        if not entries:
            return False
        for _, fields in entries:
            event = parse_event(cast("Mapping[bytes, bytes]", fields))
            if event is None or load.apply(event) is not Applied.DONE:
                return False
    return True

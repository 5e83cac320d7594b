"""One place in Redis, as its publisher writes it.

Covers what is said to Redis, how long that may take, and what the answer means. Does not cover when
it is said (`pie.index.publisher`) or what Redis does with it (`pie.index.scripts`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec
import numpy as np

from pie.index.client import asking, is_strange, look_anew, make_async_client, raise_others
from pie.index.contract import PlaceRecord
from pie.index.errors import IndexStrangeError, PlaceFencedError
from pie.index.names import PlaceKeys, places_key, stream_id
from pie.index.scripts import ANNOUNCE, APPLY, FILL, WITHDRAW, Answer, pack_changes
from pie.index.settings import IndexSettings
from pie.page.columns import PageMasks
from pie.page.events import PageEvent, PlaceCleared

log = logging.getLogger("pie.index.remote")

_KEEP_S = 60.0
"""What Redis has of a dead place goes after ten times its time to live, and not before this."""

_FILL_PAGES = 500
"""Pages written in one step of an announcement; Redis works on them for about a millisecond."""


class RemotePlace:
    """Writes one place; one call at a time.

    Every method raises `IndexUnavailableError` (`IndexRefusedError` where Redis says no) and
    `PlaceFencedError`.
    """

    def __init__(self, url: str, record: PlaceRecord, settings: IndexSettings) -> None:
        self._record = record
        self._encoded = msgspec.msgpack.encode(record)
        self._settings = settings
        self._keys = PlaceKeys(settings.key_prefix, record.place)
        self._places_key = places_key(settings.key_prefix)
        self._client = make_async_client(url)
        self._apply = self._client.register_script(APPLY)
        self._fill = self._client.register_script(FILL)
        self._announce = self._client.register_script(ANNOUNCE)
        self._withdraw = self._client.register_script(WITHDRAW)
        self._ttl_ms = max(int(record.ttl_s * 1000), 1)
        self._keep_ms = int(max(10 * record.ttl_s, _KEEP_S) * 1000)
        self._generation = ""
        self._announcements = 0
        self._unfinished = ""
        """Pages of an announcement that failed, to be removed by the next."""
        self._recent: deque[tuple[int, int]] = deque()
        """Number and entries of the events in the stream."""
        self._recent_entries = 0

    def change(self, record: PlaceRecord) -> None:
        """Write another record of the same start from the next call on."""
        assert (record.place, record.epoch) == (self._record.place, self._record.epoch)
        self._record = record
        self._encoded = msgspec.msgpack.encode(record)

    async def apply(self, events: Sequence[PageEvent], first: int) -> bool:
        """Write events, the first with number `first`, or none as a sign of life.

        Returns False where Redis lacks what went before: the place must be announced anew.
        """
        keys = self._keys
        said: list[bytes] = []
        for event in events:
            said += (pack_changes(event), msgspec.msgpack.encode(event))
            self._remember(event)
        oldest = self._recent[0][0] if self._recent else first
        async with self._asking():
            answer = await self._apply(
                keys=[keys.record, keys.pages(self._generation), keys.stream, keys.alive],
                args=[
                    *(self._record.epoch, self._generation, first, self._ttl_ms, self._keep_ms),
                    stream_id(self._record.epoch, oldest),
                    self._encoded,
                    *said,
                ],
            )
        if not events:
            # After the place's own keys are there: whoever reads the set finds them.
            await self._join()
        return self._accepted(answer)

    async def announce(self, pages: PageMasks, seq: int) -> bool:
        """Write all pages of the place under a new generation and let it count, as event `seq`.

        Returns False where Redis lost some of it meanwhile, or has a later announcement.
        """
        record, keys = self._record, self._keys
        before = await self._make_way(seq)
        if self._unfinished:
            async with self._asking():
                await self._client.unlink(self._unfinished)
        self._announcements += 1
        generation = f"{record.epoch}.{self._announcements}"
        name = self._unfinished = keys.pages(generation)
        # What an earlier process of the same epoch may have left.
        async with self._asking():
            await self._client.unlink(name)
        for mask, some in _fills(pages):
            async with self._asking():
                answer = await self._fill(
                    keys=[keys.record, name, keys.alive],
                    args=[record.epoch, self._ttl_ms, self._keep_ms, mask, some],
                )
            self._accepted(answer)
        async with self._asking():
            answer = await self._announce(
                keys=[
                    *(keys.record, name, keys.pages(before) if before else name),
                    *(keys.stream, keys.alive),
                ],
                args=[
                    *(record.epoch, generation, before, seq, len(pages.keys)),
                    *(self._encoded, self._ttl_ms, self._keep_ms),
                ],
            )
            if not self._accepted(answer):
                return False
            self._generation, self._unfinished = generation, ""
            self._recent.clear()
            self._recent_entries = 0
        await self._join()
        return True

    async def withdraw(self) -> None:
        """Take the place out."""
        keys = self._keys
        async with self._asking():
            if self._unfinished:
                await self._client.unlink(self._unfinished)
            await self._withdraw(
                keys=[keys.record, keys.pages(self._generation), keys.stream, keys.alive],
                args=[self._record.epoch, self._ttl_ms],
            )
            await self._client.srem(self._places_key, self._record.place)

    async def look_anew(self) -> None:
        """Find out who answers now, after there was no answer."""
        await look_anew(self._client)

    async def close(self) -> None:
        """Let go of connections, at once."""
        await self._client.aclose()

    async def _make_way(self, seq: int) -> str:
        """Remove what no place has written under this place's names, before event `seq`.

        Returns the generation of what is announced so far.
        """
        keys = self._keys
        async with self._asking():
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.type(keys.record)
                pipe.type(keys.stream)
                pipe.hmget(keys.record, ["epoch", "generation", "seq"])
                answers = await pipe.execute(raise_on_error=False)
            raise_others(answers)
            kind, stream_kind, said = answers
            strange = [keys.stream] if stream_kind not in (b"stream", b"none") else []
            epoch, generation, had = (None, None, None) if is_strange(said) else said
            if kind not in (b"hash", b"none") or not _is_number(epoch):
                strange.append(keys.record)
                generation = None
            elif epoch is not None and int(epoch) > self._record.epoch:
                raise PlaceFencedError(f"{self._record.place} is up in a later epoch")
            # Nobody but this place numbers events of this epoch.
            elif epoch == b"%d" % self._record.epoch and (
                not _is_number(had) or (had is not None and int(had) >= seq)
            ):
                strange.append(keys.record)
            if strange:
                names = " and ".join(strange)
                log.warning("%s held what no place has written; it is removed", names)
                await self._client.unlink(*strange)
        return generation.decode(errors="replace") if isinstance(generation, bytes) else ""

    async def _join(self) -> None:
        """Be found by those who look for places."""
        try:
            async with self._asking():
                await self._client.sadd(self._places_key, self._record.place)
        except IndexStrangeError:
            log.warning("%s held no set of places; it is made anew", self._places_key)
            async with self._asking():
                await self._client.unlink(self._places_key)
                await self._client.sadd(self._places_key, self._record.place)

    def _asking(self) -> AbstractAsyncContextManager[None]:
        return asking(self._settings.request_timeout_s)

    def _accepted(self, said: bytes) -> bool:
        """Say whether a script did its work; raises where this start of the place is over."""
        answer = Answer(said)
        if answer is Answer.STALE:
            raise PlaceFencedError(f"{self._record.place} is up in a later epoch")
        return answer is Answer.OK

    def _remember(self, event: PageEvent) -> None:
        """Count an event that the stream gets, and forget those that are too many for it."""
        if self._recent and event.seq <= self._recent[-1][0]:
            return  # said again
        entries = 0 if isinstance(event, PlaceCleared) else len(event.entries)
        self._recent.append((event.seq, entries))
        self._recent_entries += entries
        while len(self._recent) > 1 and (
            len(self._recent) > self._settings.stream_events
            or self._recent_entries > self._settings.stream_entries
        ):
            self._recent_entries -= self._recent.popleft()[1]


def _fills(pages: PageMasks) -> Iterator[tuple[int, bytes]]:
    """Cut an announcement into steps: a mask, and keys of some pages that have it."""
    for mask in np.unique(pages.masks).tolist():
        keys = pages.keys[pages.masks == mask]
        for start in range(0, len(keys), _FILL_PAGES):
            yield mask, keys[start : start + _FILL_PAGES].tobytes()


def _is_number(said: bytes | None) -> bool:
    """Say whether a field of a record is what a place would write there, or is not there."""
    return said is None or said.isdigit()

"""How a place says what it holds.

Covers announcing a place in Redis, keeping it alive there, and sending its changes. Does not cover
the queue of changes (`pie.index.outbox`) or what Redis does with them (`pie.index.scripts`).

An announcement writes all that the place holds under a new generation and then lets it count in one
step; changes follow by number. Where Redis does not have the number before, whatever the reason
(it lost everything, it went back to an older state, the place dropped changes because there were too
many), the place announces itself anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

import msgspec

from pie.index.client import Backoff, make_async_client, translated
from pie.index.contract import IndexMode, PlaceRecord
from pie.index.errors import IndexUnavailableError, PlaceFencedError
from pie.index.mirror import entry_masks
from pie.index.names import PlaceKeys, places_key
from pie.index.outbox import Outbox
from pie.index.scripts import ANNOUNCE, APPLY, WITHDRAW, Answer, pack_changes
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.page.events import PageEntry, PageEvent, PartMask
from pie.page.key import PageKey

log = logging.getLogger("pie.index.publisher")

_HEARTBEATS = 4
"""Signs of life in the time after which a place is taken for dead."""

_KEEP_S = 60.0
"""Pages and stream of a dead place go after ten times its time to live, and not before this."""

_FILL_PAGES = 1_000
"""Pages written in one step of an announcement; Redis works on them for about a millisecond."""


class Publisher:
    """Publishes one place in Redis; an `IndexWriter`.

    `stored` and `removed` may be called from any thread, return at once and never raise; call them
    *after* your own table has changed. `snapshot` is called from the event loop's thread, whenever
    the place has to be announced anew; it must be safe against your other threads and return all
    that the place holds now.

    Redis may be down at the start, go away and come back, or lose everything: the publisher keeps
    trying and announces the place anew.

    Args:
        url: Redis.
        record: What the place says of itself; its `ttl_s` sets the pace of signs of life.
        snapshot: Returns an entry for each part in each tier that the place holds.
        settings: Key prefix and limits.
        on_mode: Called with every new mode, from the event loop.
        on_fenced: Called once when a later start of this place has taken over.
    """

    def __init__(
        self,
        url: str,
        record: PlaceRecord,
        snapshot: Callable[[], Iterable[PageEntry]],
        *,
        settings: IndexSettings | None = None,
        on_mode: Callable[[IndexMode], None] | None = None,
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else IndexSettings()
        self._record = record
        self._snapshot = snapshot
        self._on_mode = on_mode
        self._on_fenced = on_fenced
        self._keys = PlaceKeys(self._settings.key_prefix, record.place)
        self._places_key = places_key(self._settings.key_prefix)
        self._client = make_async_client(url, self._settings)
        self._apply_script = self._client.register_script(APPLY)
        self._announce_script = self._client.register_script(ANNOUNCE)
        self._withdraw_script = self._client.register_script(WITHDRAW)
        self._ttl_ms = max(int(record.ttl_s * 1000), 1)
        self._keep_ms = int(max(10 * record.ttl_s, _KEEP_S) * 1000)
        self._outbox = Outbox(self._settings.queue_entries)
        self._in_flight: list[PageEvent] = []
        self._in_flight_mark = 0
        self._acked = -1
        """How many of the outbox's changes Redis has; -1 before the first announcement."""
        self._seq = 0
        self._announcements = 0
        self._generation = ""
        self._mode = IndexMode.RESYNCING
        self._fenced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[tuple[int, asyncio.Future[bool]]] = []

    @property
    def mode(self) -> IndexMode:
        """`OK` when Redis has all that was published but what is on its way."""
        return self._mode

    @property
    def fenced(self) -> bool:
        """Whether a later start of this place has taken over; nothing is published any more."""
        return self._fenced

    async def start(self) -> None:
        """Begin publishing; returns at once, whether or not Redis answers."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._run(), name=f"publish {self._record.place}")

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until Redis has all that was published before this call.

        Returns False when time is up, or when the place is fenced.
        """
        target = self._outbox.added
        if self._acked >= target or self._fenced:
            return not self._fenced
        waiter = (target, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            return await asyncio.wait_for(waiter[1], timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiters.remove(waiter)

    async def close(self) -> None:
        """Withdraw the place and let go of connections; takes seconds at most."""
        task, self._task = self._task, None
        self._outbox.close()
        if task is not None:
            await end(task)
            if not self._fenced:
                try:
                    await self._withdraw()
                except (IndexUnavailableError, PlaceFencedError) as error:
                    log.info("%s was not withdrawn: %s", self._record.place, error)
        await self._client.aclose()

    def stored(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place holds these entries from now on."""
        self._outbox.stored(entries)
        self._wake_up()

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place no longer holds these entries."""
        self._outbox.removed(entries)
        self._wake_up()

    def cleared(self) -> None:
        """Say that the place holds nothing any more."""
        self._outbox.cleared()
        self._wake_up()

    def _wake_up(self) -> None:
        """Tell the task that there is something to send; from any thread."""
        if self._loop is None or self._wake.is_set():
            return
        # The loop may be closed by now, when a place goes down in disorder.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _run(self) -> None:
        """Announce, send and show signs of life, until closed or fenced."""
        backoff = Backoff(limit_s=self._record.ttl_s / _HEARTBEATS)
        while True:
            try:
                self._wake.clear()
                announcing = self._outbox.must_announce
                if announcing:
                    await self._announce()
                else:
                    await self._send()
                if self._outbox.must_announce:
                    self._set_mode(IndexMode.RESYNCING)
                    if announcing:  # Redis lost it while it was written, or changes came too fast
                        await asyncio.sleep(backoff.next_s())
                    continue
                backoff.reset()
                self._set_mode(IndexMode.OK)
                self._tell_waiters()
                if self._acked >= self._outbox.added:
                    await self._pause(self._record.ttl_s / _HEARTBEATS)
            except PlaceFencedError:
                self._fence()
                return
            except IndexUnavailableError as error:
                if self._mode is not IndexMode.DEGRADED:
                    log.warning("%s cannot publish, and tries again: %s", self._record.place, error)
                self._set_mode(IndexMode.DEGRADED)
                await asyncio.sleep(backoff.next_s())
            except Exception:
                # Such as a snapshot that raises: the place must not vanish for good.
                log.exception("%s cannot publish, and tries again", self._record.place)
                self._outbox.begin_anew()
                self._set_mode(IndexMode.DEGRADED)
                await asyncio.sleep(backoff.next_s())

    async def _pause(self, limit_s: float) -> None:
        """Wait for something to send."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), limit_s)

    async def _send(self) -> None:
        """Send the next events, or the ones whose answer was lost, or a sign of life."""
        record = self._record
        if not self._in_flight:
            self._in_flight, self._in_flight_mark = self._outbox.take(
                record.place, record.epoch, self._seq + 1
            )
            self._seq += len(self._in_flight)
        first = self._in_flight[0].seq if self._in_flight else self._seq + 1
        events: list[bytes] = []
        for event in self._in_flight:
            events += (pack_changes(event), msgspec.msgpack.encode(event))
        with translated():
            said = await self._apply_script(
                keys=[self._keys.record, self._keys.pages(self._generation), self._keys.stream],
                args=[
                    *(record.epoch, self._generation, first, self._ttl_ms, self._keep_ms),
                    self._settings.stream_events,
                    *events,
                ],
            )
            if not self._in_flight:
                # After the place's own keys are there: whoever reads the set finds them.
                await self._client.sadd(self._places_key, record.place)
        if self._accepted(said):
            if self._in_flight:
                self._acked = self._in_flight_mark
            self._in_flight = []
        else:
            log.info("%s announces itself anew: Redis lacks what went before", record.place)
            self._in_flight = []
            self._outbox.begin_anew()

    async def _announce(self) -> None:
        """Write all that the place holds, and let it count."""
        record = self._record
        self._set_mode(IndexMode.RESYNCING)
        self._in_flight = []
        mark = self._outbox.announcing()
        try:
            entries = list(self._snapshot())
            with translated():
                await self._write_announcement(entries)
        except BaseException:
            self._outbox.begin_anew()
            raise
        if self._generation:
            self._acked = mark
            log.debug("%s has announced %d entries", record.place, len(entries))
        else:
            self._outbox.begin_anew()

    async def _write_announcement(self, entries: list[PageEntry]) -> None:
        """Write pages under a new generation and commit it; no generation is set where that failed."""
        record, keys = self._record, self._keys
        self._generation = ""
        epoch, said_before = await self._client.hmget(keys.record, ["epoch", "generation"])
        if epoch is not None and int(epoch) > record.epoch:
            raise PlaceFencedError(f"{record.place} is up in a later epoch")
        before = said_before.decode() if isinstance(said_before, bytes) else ""
        self._announcements += 1
        self._seq += 1
        generation = f"{record.epoch}.{self._announcements}"
        pages = keys.pages(generation)
        masks: dict[PageKey, PartMask] = {}
        for start in range(0, len(entries), _FILL_PAGES):
            for key, mask in entry_masks(entries[start : start + _FILL_PAGES]):
                masks[key] = PartMask(masks.get(key, 0) | mask)
            await asyncio.sleep(0)
        rest = iter(masks.items())
        await self._client.unlink(pages)
        while some := list(islice(rest, _FILL_PAGES)):
            async with self._client.pipeline(transaction=False) as pipe:
                pipe.hset(pages, mapping={bytes(key): int(mask) for key, mask in some})
                pipe.pexpire(pages, self._keep_ms)
                # What was announced before stays alive until this replaces it.
                pipe.pexpire(keys.record, self._ttl_ms)
                await pipe.execute()
        said = await self._announce_script(
            keys=[keys.record, pages, keys.pages(before) if before else pages, keys.stream],
            args=[
                *(record.epoch, generation, before, self._seq, len(masks)),
                *(msgspec.msgpack.encode(record), self._ttl_ms, self._keep_ms),
                self._settings.stream_events,
            ],
        )
        if self._accepted(said):
            self._generation = generation
            await self._client.sadd(self._places_key, record.place)

    async def _withdraw(self) -> None:
        keys = self._keys
        with translated():
            await self._withdraw_script(
                keys=[keys.record, keys.pages(self._generation), keys.stream],
                args=[self._record.epoch, self._generation, self._ttl_ms],
            )
            await self._client.srem(self._places_key, self._record.place)

    def _accepted(self, said: bytes) -> bool:
        """Say whether a script did its work; raises where this start of the place is over."""
        answer = Answer(said)
        if answer is Answer.STALE:
            raise PlaceFencedError(f"{self._record.place} is up in a later epoch")
        return answer is Answer.OK

    def _fence(self) -> None:
        """Fall silent: a later start of this place has taken over."""
        log.error("%s is up in a later epoch; this one publishes no more", self._record.place)
        self._fenced = True
        self._outbox.close()
        self._set_mode(IndexMode.DEGRADED)
        self._tell_waiters()
        if self._on_fenced is not None:
            try:
                self._on_fenced()
            except Exception:
                log.exception("on_fenced raised")

    def _tell_waiters(self) -> None:
        for target, waiter in self._waiters:
            if (self._fenced or self._acked >= target) and not waiter.done():
                waiter.set_result(not self._fenced)

    def _set_mode(self, mode: IndexMode) -> None:
        if mode is self._mode:
            return
        self._mode = mode
        if self._on_mode is not None:
            try:
                self._on_mode(mode)
            except Exception:
                log.exception("on_mode raised")

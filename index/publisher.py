"""How a place says what it holds.

Covers when a place is announced, kept alive and changed in Redis. Does not cover the queue of changes
(`pie.index.outbox`) or how they are written (`pie.index.remote`).

An announcement writes all that the place holds under a new generation and then lets it count in one
step; changes follow by number. Where Redis does not have the number before, whatever the reason
(it lost everything, it went back to an older state, the place dropped changes because there were too
many), the place announces itself anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from pie.index.client import Backoff
from pie.index.contract import IndexMode, PlaceRecord
from pie.index.errors import IndexRefusedError, IndexUnavailableError, PlaceFencedError
from pie.index.outbox import Outbox
from pie.index.remote import RemotePlace
from pie.index.settings import IndexSettings
from pie.index.tasks import end
from pie.index.trouble import Trouble
from pie.page.columns import PageMasks, masks_of
from pie.page.events import PageEntry, PageEvent

log = logging.getLogger("pie.index.publisher")

_HEARTBEATS = 4
"""Signs of life in the time after which a place is taken for dead."""

Snapshot = Iterable[PageEntry] | Awaitable[PageMasks]
"""What a place holds."""


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
        snapshot: Returns an entry for each part in each tier that the place holds, or what to wait
            for: the same as columns, of a place that may hold millions.
        settings: Key prefix and limits.
        on_mode: Called with every new mode, from the event loop.
        on_fenced: Called once when a later start of this place has taken over.
        may_announce: Waited for before anything is published; where it says no, nothing ever is.
    """

    def __init__(
        self,
        url: str,
        record: PlaceRecord,
        snapshot: Callable[[], Snapshot],
        *,
        settings: IndexSettings | None = None,
        on_mode: Callable[[IndexMode], None] | None = None,
        on_fenced: Callable[[], None] | None = None,
        may_announce: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        self._settings = settings if settings is not None else IndexSettings()
        self._record = record
        self._snapshot = snapshot
        self._on_mode = on_mode
        self._on_fenced = on_fenced
        self._may_announce = may_announce
        self._remote = RemotePlace(url, record, self._settings)
        self._outbox = Outbox(self._settings.queue_entries)
        self._in_flight: list[PageEvent] = []
        self._in_flight_mark = 0
        self._acked = -1
        """How many of the outbox's changes Redis has; -1 before the first announcement."""
        self._seq = 0
        self._mode = IndexMode.RESYNCING
        self._trouble = Trouble(log)
        self._fenced = False
        self._closing = False
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
        """Whether another start of this place counts; nothing is published any more."""
        return self._fenced

    async def start(self) -> None:
        """Begin publishing; returns at once, whether or not Redis answers."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._publish(), name=f"publish {self._record.place}")

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until Redis has all that was published before this call.

        Returns False when time is up, or when the place is fenced or closed.
        """
        target = self._outbox.added
        if self._acked >= target or self._fenced:
            return not self._fenced
        if self._closing:
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        waiter = (target, future)
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return False
        finally:
            self._waiters.remove(waiter)

    async def close(self) -> None:
        """Withdraw the place and let go of connections; takes seconds at most."""
        task, self._task = self._task, None
        self._closing = True
        self._outbox.close()
        self._tell_waiters()
        try:
            if task is not None:
                await end([task])
                if not self._fenced:
                    await self._remote.withdraw()
        except (IndexUnavailableError, PlaceFencedError) as error:
            log.info("%s was not withdrawn: %s", self._record.place, error)
        finally:
            await self._remote.close()

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

    def change(self, record: PlaceRecord) -> None:
        """Say something else of this start of the place; from the event loop's thread."""
        self._record = record
        self._remote.change(record)
        self._wake_up()

    def _wake_up(self) -> None:
        """Tell the task that there is something to send; from any thread."""
        if self._loop is None or self._wake.is_set():
            return
        # The loop may be closed by now, when a place goes down in disorder.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake.set)

    async def _publish(self) -> None:
        """Publish as soon as that is allowed, until closed or fenced."""
        if self._may_announce is not None:
            self._set_mode(IndexMode.DEGRADED)
            if not await self._may_announce():
                self._fall_silent()
                return
        await self._run()

    async def _run(self) -> None:
        """Announce, send and show signs of life, until closed or fenced."""
        pause_s = self._record.ttl_s / _HEARTBEATS
        backoff = Backoff(limit_s=pause_s)
        announced = False  # and nothing was sent since
        while not self._closing:
            try:
                self._wake.clear()
                if self._outbox.must_announce:
                    if announced:
                        # It did not last: lost while it was written, or changes come too fast.
                        await asyncio.sleep(backoff.next_s())
                    announced = True
                    await self._announce()
                else:
                    await self._send()
                    if not self._outbox.must_announce:
                        announced = False
                        backoff.reset()
                if self._outbox.must_announce:
                    self._set_mode(IndexMode.RESYNCING)
                    continue
                self._set_mode(IndexMode.OK)
                self._trouble.ends("%s publishes again", self._record.place)
                self._tell_waiters()
                if self._acked >= self._outbox.added:
                    await self._pause(pause_s)
            except PlaceFencedError:
                self._fence()
                return
            except IndexUnavailableError as error:
                self._trouble.begins(
                    "%s cannot publish, and tries again: %s", self._record.place, error
                )
                if isinstance(error, IndexRefusedError):
                    # The same again may be refused again, for ever.
                    self._begin_anew()
                    announced = False  # one wait is enough
                self._set_mode(IndexMode.DEGRADED)
                await self._remote.look_anew()
                await asyncio.sleep(backoff.next_s())
            except Exception:
                # Such as a snapshot that raises: the place must not vanish for good.
                log.exception("%s cannot publish, and tries again", self._record.place)
                self._begin_anew()
                announced = False
                self._set_mode(IndexMode.DEGRADED)
                await asyncio.sleep(backoff.next_s())

    async def _pause(self, limit_s: float) -> None:
        """Wait for something to send."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()

    def _begin_anew(self) -> None:
        self._in_flight = []
        self._outbox.begin_anew()

    async def _send(self) -> None:
        """Send the next events, or the ones whose answer was lost, or a sign of life."""
        record = self._record
        if not self._in_flight:
            self._in_flight, self._in_flight_mark = self._outbox.take(
                record.place, record.epoch, self._seq + 1
            )
            self._seq += len(self._in_flight)
        first = self._in_flight[0].seq if self._in_flight else self._seq + 1
        if await self._remote.apply(self._in_flight, first):
            if self._in_flight:
                self._acked = self._in_flight_mark
            self._in_flight = []
        else:
            log.info("%s announces itself anew: Redis lacks what went before", record.place)
            self._begin_anew()

    async def _announce(self) -> None:
        """Write all that the place holds, and let it count."""
        self._set_mode(IndexMode.RESYNCING)
        self._in_flight = []
        mark = self._outbox.announcing()
        done = False
        try:
            masks = await self._gather()
            self._seq += 1
            done = await self._remote.announce(masks, self._seq)
        finally:
            if not done:
                self._outbox.begin_anew()
        if done:
            self._acked = mark
            log.debug("%s has announced %d pages", self._record.place, len(masks.keys))

    async def _gather(self) -> PageMasks:
        """Return what the place holds now, by page."""
        said = self._snapshot()
        if isinstance(said, Awaitable):
            return await said
        return await asyncio.to_thread(masks_of, list(said))

    def _fence(self) -> None:
        """Fall silent: a later start of this place has taken over."""
        log.error("%s is up in a later epoch; this one publishes no more", self._record.place)
        self._fall_silent()
        if self._on_fenced is not None:
            try:
                self._on_fenced()
            except Exception:
                log.exception("on_fenced raised")

    def _fall_silent(self) -> None:
        self._fenced = True
        self._outbox.close()
        self._set_mode(IndexMode.DEGRADED)
        self._tell_waiters()

    def _tell_waiters(self) -> None:
        for target, waiter in self._waiters:
            over = self._fenced or self._closing
            if (over or self._acked >= target) and not waiter.done():
                waiter.set_result(not over)

    def _set_mode(self, mode: IndexMode) -> None:
        if mode is self._mode:
            return
        self._mode = mode
        if self._on_mode is not None:
            try:
                self._on_mode(mode)
            except Exception:
                log.exception("on_mode raised")

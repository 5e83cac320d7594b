"""What a pool node does with each message.

Covers look-ups, claims, sending and taking pages. Does not cover sockets (`pie.wire.server`) or
what is kept (`pie.pool.cache`).

Pages are sent from the arena without a copy: the loan ends when zmq no longer reads it. Payloads
are copied and hashed on the event loop while they are small and on a thread otherwise, because a
change of threads costs as much as 512 KiB: a get of 360 KiB takes 0.36 ms
without and 0.45 ms with one. What has to wait for a lower tier never happens on the event loop, nor
where others wait for a nearer one (`pie.pool.lanes`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import TypeVar

from pie.page.events import Part
from pie.page.header import FORMAT_VERSION, PageHeader
from pie.page.key import KEY_BYTES
from pie.page.lookup import LookupStatus
from pie.pool.cache import Loan, TieredCache
from pie.pool.claims import Claims
from pie.pool.copying import copy_payload
from pie.pool.errors import NotSharedError
from pie.pool.lanes import Lanes
from pie.pool.order_service import OrderService
from pie.pool.pinned import PinnedPages
from pie.pool.settings import PoolSettings
from pie.pool.shared_memory import MappedArea
from pie.pool.tier import PageId, id_of
from pie.wire.errors import RefusedError
from pie.wire.messages import (
    GetPages,
    Lookup,
    LookupResult,
    MemoryShared,
    Message,
    PageData,
    PutPages,
    PutResult,
    PutStatus,
    RefusalCode,
    ShareMemory,
    StoreWanted,
)
from pie.wire.orders import ChangeResult, PinPages, RemovePages, UnpinPages
from pie.wire.peer import Peer

_INLINE_BYTES = 512 << 10
_BATCH_BYTES = 4 << 20
"""Payloads that are checked together; as many again wait meanwhile to be sent, and stay pinned."""

_PUT_STATUS = {
    LookupStatus.HIT: PutStatus.HELD,
    LookupStatus.PENDING: PutStatus.PENDING,
    LookupStatus.RETRY: PutStatus.REFUSED,
    LookupStatus.MISS: PutStatus.REFUSED,
}

_PARTS = {int(part): part for part in Part}

_MAX_NAME_CHARS = 128
"""Of a dtype, a layout id or a tenant tag, so that a header stays within its bookkeeping."""

_MOST_SHARED_BYTES = 1 << 40

T = TypeVar("T")

_Lent = Loan | PageHeader | LookupStatus
"""A page on loan, one that has been put where the client wants it, or why there is none."""


class PoolService:
    """Answers the messages of one node. For one event loop."""

    def __init__(
        self,
        cache: TieredCache,
        lanes: Lanes,
        settings: PoolSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.claims = Claims(settings.claim_timeout_s)
        self.draining = False
        self.loans = 0
        self.malformed = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self._cache = cache
        self._lanes = lanes
        self._clock = clock
        self._orders = OrderService(cache, int(settings.ram_budget), lanes.store, clock=clock)
        self._writers: set[bytes] = set()
        self._areas: dict[bytes, MappedArea] = {}
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def handle(self, peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        """Carry out one message.

        Raises:
            RefusedError: The node is draining, or the message makes no sense.
        """
        match message:
            case Lookup():
                await peer.send(LookupResult(message.request_id, self._lookup(message)))
            case StoreWanted():
                await peer.send(LookupResult(message.request_id, self._wanted(peer, message)))
            case GetPages():
                with self._busy():
                    await self._send_pages(peer, message)
            case RemovePages() | PinPages() | UnpinPages():
                if isinstance(message, PinPages):
                    self._refuse_if_draining()
                with self._busy():
                    changes = await self._orders.change(message, _pages(message))
                await peer.send(ChangeResult(message.request_id, tuple(map(int, changes))))
            case ShareMemory():
                self._share(peer, message)
                await peer.send(MemoryShared(message.request_id))
            case PutPages():
                with self._busy():
                    statuses = await self._take_pages(message, frames)
                await peer.send(PutResult(message.request_id, statuses))
            case _:
                raise RefusedError(
                    RefusalCode.BAD_MESSAGE, f"a pool node takes no {type(message).__name__}"
                )

    def drain(self) -> None:
        """Refuse stores from now on, and keep no page for anybody's sake."""
        self.draining = True
        self.pinned.close()

    @property
    def pinned(self) -> PinnedPages:
        """Pages that stay because somebody asked for it."""
        return self._orders.pinned

    async def idle(self) -> None:
        """Wait until no page is on its way."""
        await self._idle.wait()

    def _share(self, peer: Peer, message: ShareMemory) -> None:
        """Take on memory that a client lends.

        Raises:
            RefusedError: It cannot be had from here.
        """
        try:
            area = MappedArea(
                message.pid, message.file, message.size_bytes, message.token, _MOST_SHARED_BYTES
            )
        except NotSharedError as error:
            raise RefusedError(RefusalCode.FAILED, f"memory is not shared: {error}") from error
        if peer.id not in self._areas:
            peer.on_gone(lambda: self._forget_area(peer.id))
        self._areas[peer.id] = area

    def _forget_area(self, client: bytes) -> None:
        self._areas.pop(client, None)

    def _lookup(self, message: Lookup) -> tuple[int, ...]:
        now_s = self._clock()
        pages = _pages(message)
        statuses: list[int] = [*self._cache.lookups(pages)]
        if len(self.claims):
            for at, page in enumerate(pages):
                if not statuses[at] and self.claims.is_taken(page, now_s):
                    statuses[at] = LookupStatus.PENDING
        return tuple(statuses)

    def _wanted(self, peer: Peer, message: StoreWanted) -> tuple[int, ...]:
        """Give each page that is not there to the first writer that asks."""
        self._refuse_if_draining()
        if peer.id not in self._writers:
            self._writers.add(peer.id)
            peer.on_gone(lambda: self._writer_gone(peer.id))
        now_s = self._clock()
        statuses = []
        pages = _pages(message)
        for page, known in zip(pages, self._cache.lookups(pages), strict=True):
            status = known
            if status is LookupStatus.MISS and not self.claims.take(page, peer.id, now_s):
                taken = self.claims.is_taken(page, now_s)
                status = LookupStatus.PENDING if taken else LookupStatus.RETRY
            statuses.append(int(status))
        return tuple(statuses)

    def _writer_gone(self, writer: bytes) -> None:
        self._writers.discard(writer)
        self.claims.writer_gone(writer)

    async def _send_pages(self, peer: Peer, message: GetPages) -> None:
        """Send each page as soon as it is checked, while the next ones are."""
        rooms = self._rooms(peer, message)
        batches = list(self._batches(_pages(message)))
        position = 0
        lending: asyncio.Task[list[_Lent]] | None = None
        try:
            for at, batch in enumerate(batches):
                room = rooms[position : position + len(batch)]
                lent = await (self._lend(batch, room) if lending is None else lending)
                lending = None
                if at + 1 < len(batches):
                    room = rooms[position + len(batch) :]
                    lending = asyncio.create_task(self._lend(batches[at + 1], room))
                await self._send_batch(peer, message.request_id, position, lent)
                position += len(batch)
        finally:
            if lending is not None:
                lending.add_done_callback(self._unsent)
                lending.cancel()

    async def _send_batch(
        self, peer: Peer, request_id: str, position: int, lent: list[_Lent]
    ) -> None:
        """Send what was lent, from the page at `position` on; all loans end, whatever happens."""
        hit = int(LookupStatus.HIT)
        try:
            while lent:
                loan = lent.pop(0)
                if isinstance(loan, Loan):
                    data = PageData(request_id, position, hit, loan.page.header)
                    # From here on `release` ends the loan, also where sending fails.
                    await peer.send(data, [loan.page.payload], release=self._ender(loan))
                    self.sent_bytes += loan.page.payload.nbytes
                elif isinstance(loan, PageHeader):
                    await peer.send(PageData(request_id, position, hit, loan, in_slot=True))
                    self.sent_bytes += loan.raw_bytes
                else:
                    await peer.send(PageData(request_id, position, int(loan)))
                position += 1
        finally:
            self._end_all(lent)

    def _unsent(self, lending: asyncio.Task[list[_Lent]]) -> None:
        """End the loans of a batch that nobody sends any more."""
        if not lending.cancelled() and lending.exception() is None:
            self._end_all(lending.result())

    def _end_all(self, lent: Sequence[_Lent]) -> None:
        for loan in lent:
            if isinstance(loan, Loan):
                self._ender(loan)()

    def _batches(self, pages: Sequence[PageId]) -> Iterator[list[tuple[PageId, int]]]:
        """Cut pages into runs of about `_BATCH_BYTES`, each page with its size."""
        batch: list[tuple[PageId, int]] = []
        total = 0
        for page in pages:
            size = self._cache.payload_bytes(page)
            if batch and total + size > _BATCH_BYTES:
                yield batch
                batch, total = [], 0
            batch.append((page, size))
            total += size
        if batch:
            yield batch

    def _rooms(self, peer: Peer, message: GetPages) -> list[memoryview | None]:
        """Return for each page where in the client's memory it may be put, if anywhere."""
        area = self._areas.get(peer.id)
        if area is None or len(message.slots) != len(message.pages):
            return [None] * len(message.pages)
        return [area.slot(offset, size) if size else None for offset, size in message.slots]

    async def _lend(
        self, batch: Sequence[tuple[PageId, int]], rooms: Sequence[memoryview | None]
    ) -> list[_Lent]:
        """Lend the pages of a batch, or put them into the first of `rooms`.

        Begins where the first page is; from one that lies lower on, it goes on in that tier's lane.
        """
        pages = [page for page, _ in batch]
        is_small = sum(size for _, size in batch) <= _INLINE_BYTES
        lent: list[_Lent] = []
        try:
            for level in range(self._cache.level_of(pages[0]), len(self._cache.tiers)):
                at = len(lent)
                work = functools.partial(self._borrow, pages[at:], rooms[at : len(pages)], level)
                if not level and is_small:
                    more = work()
                else:
                    more = await self._in_thread(self._lanes.load(level), work, self._give_back)
                lent += more
                if len(lent) == len(pages):
                    break
        except BaseException:
            self._give_back(lent)
            raise
        self._lent(sum(isinstance(loan, Loan) for loan in lent))
        return lent

    def _borrow(
        self, pages: Sequence[PageId], rooms: Sequence[memoryview | None], level: int
    ) -> list[_Lent]:
        """Lend pages from tiers down to `level`, up to the first one that needs a lower one."""
        if level:
            self._cache.expect(pages)
        is_last = level == len(self._cache.tiers) - 1
        lent: list[_Lent] = []
        try:
            for page, room in zip(pages, rooms, strict=True):
                one = self._borrow_page(page, room, level)
                if one is LookupStatus.RETRY and not is_last:
                    break
                lent.append(one)
        except BaseException:
            self._give_back(lent)
            raise
        return lent

    def _borrow_page(self, page: PageId, room: memoryview | None, level: int) -> _Lent:
        loan = self._cache.prepare_load(page, levels=level + 1)
        if room is None or not isinstance(loan, Loan) or loan.page.payload.nbytes > room.nbytes:
            return loan
        try:
            copy_payload(room[: loan.page.payload.nbytes], loan.page.payload)
            return loan.page.header
        finally:
            self._cache.complete_load(loan)

    def _give_back(self, loans: Sequence[_Lent]) -> None:
        for loan in loans:
            if isinstance(loan, Loan):
                self._end_loan(loan)

    def _end_loan(self, loan: Loan) -> None:
        """End a loan, not on this thread where a tier has to remove the page."""
        if loan.level and self._cache.is_leaving(loan):
            with contextlib.suppress(
                RuntimeError
            ):  # The node is closed, and all loans end with it.
                self._lanes.load(loan.level).submit(self._cache.complete_load, loan)
        else:
            self._cache.complete_load(loan)

    def _lent(self, count: int) -> None:
        self.loans += count
        self._note_idle()

    def _ender(self, loan: Loan) -> Callable[[], None]:
        def end() -> None:
            self._end_loan(loan)
            self._lent(-1)

        return end

    async def _take_pages(self, message: PutPages, frames: Sequence[memoryview]) -> tuple[int, ...]:
        self._refuse_if_draining()
        if len(frames) != len(message.headers):
            raise RefusedError(
                RefusalCode.BAD_MESSAGE,
                f"{len(message.headers)} headers with {len(frames)} payloads",
            )
        size = sum(frame.nbytes for frame in frames)
        puts = list(zip(message.headers, frames, strict=True))
        may_wait = message.may_evict and self._cache.is_tiered

        def take(statuses: Sequence[PutStatus | None], may_evict: bool) -> list[PutStatus | None]:
            return [
                self._take_page(*put, may_evict=may_evict) if status is None else status
                for put, status in zip(puts, statuses, strict=True)
            ]

        quick = functools.partial(take, [None] * len(puts), message.may_evict and not may_wait)
        is_small = size <= _INLINE_BYTES
        statuses = quick() if is_small else await self._in_thread(self._lanes.check, quick)
        if None in statuses and may_wait:
            evicting = functools.partial(take, statuses, True)
            statuses = await self._in_thread(self._lanes.store, evicting)
        for header, frame in zip(message.headers, frames, strict=True):
            self.claims.end(id_of(header))
            self.received_bytes += frame.nbytes
        return tuple(int(PutStatus.REFUSED if status is None else status) for status in statuses)

    def _take_page(
        self, header: PageHeader, payload: memoryview, *, may_evict: bool = True
    ) -> PutStatus | None:
        """Copy one page into the cache, which checks it. On any thread.

        Returns None where something would have to leave for it, and may not.
        """
        if not _is_sound(header, payload):
            self.malformed += 1
            return PutStatus.REFUSED
        room = self._cache.prepare_store(header, may_evict=may_evict)
        if room is LookupStatus.RETRY and not may_evict:
            return None
        if not isinstance(room, memoryview):
            return _PUT_STATUS[room]
        copied = False
        try:
            copy_payload(room, payload)
            copied = True
        finally:
            good = self._cache.complete_store(id_of(header), success=copied)
        return PutStatus.STORED if good else PutStatus.REFUSED

    async def _in_thread(
        self,
        threads: Executor,
        work: Callable[[], T],
        undo: Callable[[T], None] | None = None,
    ) -> T:
        """Do `work` beside the event loop; `undo` it if nobody waits any more."""
        future = asyncio.get_running_loop().run_in_executor(threads, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: _abandon(done, undo))
            raise

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        self._active += 1
        self._note_idle()
        try:
            yield
        finally:
            self._active -= 1
            self._note_idle()

    def _note_idle(self) -> None:
        if self._active or self.loans:
            self._idle.clear()
        else:
            self._idle.set()

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise RefusedError(RefusalCode.DRAINING, "the node is about to stop")


def _pages(
    message: Lookup | StoreWanted | GetPages | RemovePages | PinPages | UnpinPages,
) -> list[PageId]:
    """Return the pages that a message names.

    Raises:
        RefusedError: There is no such part.
    """
    try:
        return [PageId(key, _PARTS[part]) for key, part in message.pages]
    except KeyError as error:
        raise RefusedError(RefusalCode.BAD_MESSAGE, f"no part has the number {error}") from None


def _is_sound(header: PageHeader, payload: memoryview) -> bool:
    """Say whether a header from elsewhere makes sense; whether the payload is right is checked later."""
    return (
        len(header.key) == len(header.parent) == len(header.model_root) == KEY_BYTES
        and header.raw_bytes == payload.nbytes > 0
        and len(header.group) in {0, KEY_BYTES}
        and header.index >= 0
        and header.codec == "none"
        and header.version == FORMAT_VERSION
        and max(map(len, (header.dtype, header.layout_id, header.tenant_tag, header.session_tag)))
        <= _MAX_NAME_CHARS
    )


def _abandon(done: asyncio.Future[T], undo: Callable[[T], None] | None) -> None:
    """Undo what a thread did after its caller had left."""
    if not done.cancelled() and done.exception() is None and undo is not None:
        undo(done.result())

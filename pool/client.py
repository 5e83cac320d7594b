"""The pool as its users see it: load pages, store pages, never wait long.

Covers choosing nodes, transfers, deadlines and checks on receipt. Does not cover which pages are
worth storing or loading (`pie.worker.offload`) or connections (`pie.pool.links`).
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from msgspec import structs

from pie.index.contract import IndexReader, PlaceRecord
from pie.page.events import PlaceId
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.page.lookup import LookupStatus
from pie.policies.replication import FixedReplication, ReplicationPolicy
from pie.pool.asking import STATUSES, WrongAnswerError, ask_statuses, at_once, by_bytes, names
from pie.pool.byte_budget import ByteBudget
from pie.pool.checksum import Checksum
from pie.pool.landing import Landing
from pie.pool.links import NodeLinks
from pie.pool.page_orders import PageOrders
from pie.pool.placement import Placement
from pie.pool.settings import PoolSettings
from pie.pool.tier import Buffer, PageId, StoredPage, id_of
from pie.wire.client import WireClient
from pie.wire.errors import PeerGone, RefusedError, WireError, WireTimeout
from pie.wire.ids import new_request_id
from pie.wire.messages import (
    GetPages,
    Lookup,
    Message,
    PageData,
    PutPages,
    PutStatus,
    RefusalCode,
    StoreWanted,
)
from pie.wire.settings import WireSettings

_INLINE_BYTES = 1 << 20
"""Payloads up to this size are hashed on the event loop (0.1 ms), larger ones on a thread."""

_HIT = LookupStatus.HIT
"""A name of its own: look-ups of thousands of pages would spend a third of their time on members."""

_PUTS_AT_ONCE = 4
"""Messages of pages on their way to one node, which copies and checks one while the next comes in."""

_GET_PAGES = 256
_FIRST_GUESS_BYTES = 1 << 20


class Reason(enum.StrEnum):
    """Why a page was not loaded, or was dropped on its way to the pool."""

    NO_NODE = "no_node"
    GONE = "gone"
    """Its node does not answer, or went while it was asked."""
    TIMEOUT = "timeout"
    REFUSED = "refused"
    STALE_EPOCH = "stale_epoch"
    NOT_HELD = "not_held"
    PENDING = "pending"
    """Somebody is writing it."""
    BUSY = "busy"
    """The node cannot say now, or has no room."""
    BAD_PAGE = "bad_page"
    """The payload does not match its checksum, or is of another page."""
    FAILED = "failed"


@dataclass(slots=True)
class PoolCounters:
    """What one client has seen since its start."""

    loaded: int = 0
    loaded_bytes: int = 0
    missed: Counter[Reason] = field(default_factory=Counter)
    stored: Counter[PutStatus] = field(default_factory=Counter)
    stored_bytes: int = 0
    """Payload of pages that this client brought."""
    dropped: Counter[Reason] = field(default_factory=Counter)
    """Pages whose store ended as `REFUSED`."""


_Work = Callable[[WireClient, Sequence[int]], Awaitable[None]]
"""Does something with one node and the positions of the pages that belong there. `_spread` ends it in time."""


class PoolClient:
    """Loads pages from pool nodes and stores pages there. For one event loop.

    Nodes are the places of kind `POOL` that `reader` knows. A dead, slow or wrong node is a miss,
    never an error and never a wait past a deadline.
    """

    def __init__(
        self,
        reader: IndexReader,
        settings: PoolSettings,
        *,
        secret: bytes | None = None,
        wire_settings: WireSettings | None = None,
        replication: ReplicationPolicy | None = None,
    ) -> None:
        """Prepare a client; it connects to nodes as it needs them.

        Args:
            reader: Says which nodes there are.
            settings: Limits.
            secret: 32 bytes that all of the cluster share, where pages are keyed with them.
            wire_settings: Limits of the wire.
            replication: How many nodes keep a page; what the settings say where None.
        """
        self.counters = PoolCounters()
        self._replication = replication or FixedReplication(settings.copies)
        self._links = NodeLinks(reader, wire_settings, secret=secret)
        self.orders = PageOrders(self._links)
        self._checksum = Checksum(secret)
        self._budget = ByteBudget(settings.inflight_budget)
        self._landing = Landing(int(settings.shared_memory))
        self._turn = 0
        self._page_bytes = 0
        """The largest payload received so far: what a page on its way is taken for."""

    async def lookup(
        self, pages: Sequence[PageId], *, groups: Sequence[PageKey], deadline_s: float
    ) -> list[LookupStatus]:
        """Ask the nodes what they know of each page; `RETRY` where nobody answers in time.

        As of a load, the next nodes are asked too for a page that its home does not have; unless
        one of them has it, the home's answer counts.
        """
        answers: list[LookupStatus | None] = [None] * len(pages)
        until_s = time.monotonic() + deadline_s

        async def ask(client: WireClient, positions: Sequence[int]) -> None:
            message = Lookup(new_request_id(), client.epoch, names(pages[at] for at in positions))
            statuses = await ask_statuses(client, message, None)
            for at, status in zip(positions, statuses, strict=True):
                heard = STATUSES[status]
                if heard is _HIT or answers[at] is None:
                    answers[at] = heard

        asked = self._asked(groups)
        for turn in range(_most(asked)):
            left_s = until_s - time.monotonic()
            left = [
                (at, order[turn])
                for at, (order, answer) in enumerate(zip(asked, answers, strict=True))
                if answer is not _HIT and turn < len(order)
            ]
            if not left or left_s <= 0:
                break
            await self._spread(left, ask, left_s)
        return [LookupStatus.RETRY if answer is None else answer for answer in answers]

    async def load(
        self, pages: Sequence[PageId], *, groups: Sequence[PageKey], deadline_s: float
    ) -> list[StoredPage | None]:
        """Return each page with its payload, checked, or None where it is a miss.

        Args:
            pages: What to load, in the order of the sequence.
            groups: For each page the first key of its group: the slice of
                `placement.group_keys(chain)` that belongs to `pages`.
            deadline_s: Seconds after which whatever has not come is a miss.

        A page that its home does not bring is asked of the nodes after it in rank: those that keep
        copies, and the one that kept it while the home was away. Payloads stay valid as long as they are referenced.
        """
        if len(pages) != len(groups):
            raise ValueError(f"{len(pages)} pages, {len(groups)} groups")
        loaded: list[StoredPage | None] = [None] * len(pages)
        reasons: dict[int, Reason] = {}
        until_s = time.monotonic() + deadline_s

        async def get(client: WireClient, positions: Sequence[int]) -> None:
            for start in range(0, len(positions), _GET_PAGES):
                some = positions[start : start + _GET_PAGES]
                guess = (self._page_bytes or _FIRST_GUESS_BYTES) * len(some)
                async with self._budget.reserve(guess):
                    wanted = [pages[at] for at in some]
                    slots = await self._landing.slots(client, wanted)
                    message = GetPages(new_request_id(), client.epoch, names(wanted), slots.message)
                    # A generator, which has to end before its reservation does.
                    stream = client.stream(message, timeout_s=None)
                    with slots:
                        async with contextlib.aclosing(stream) as answers:
                            async for answer, frames in answers:
                                position = _position_of(answer, len(some))
                                landed = slots.landed(position, answer)
                                at = some[position]
                                got = await self._checked(pages[at], answer, landed or frames)
                                if isinstance(got, StoredPage):
                                    loaded[at] = got
                                else:
                                    reasons.setdefault(at, got)

        asked = self._asked(groups)
        for turn in range(_most(asked)):
            left_s = until_s - time.monotonic()
            left = [
                (at, order[turn])
                for at, order in enumerate(asked)
                if turn < len(order) and loaded[at] is None
            ]
            if not left or left_s <= 0:
                break
            for at, reason in (await self._spread(left, get, left_s)).items():
                # What the home said is why the page was not where it belongs.
                reasons.setdefault(at, reason)
        for at, page in enumerate(loaded):
            if page is None:
                nowhere = Reason.FAILED if asked[at] else Reason.NO_NODE
                self.counters.missed[reasons.get(at, nowhere)] += 1
            else:
                self.counters.loaded += 1
                self.counters.loaded_bytes += page.payload.nbytes
        return loaded

    async def store(
        self,
        headers: Sequence[PageHeader],
        payloads: Sequence[Buffer],
        *,
        groups: Sequence[PageKey],
        deadline_s: float,
    ) -> list[PutStatus]:
        """Offer pages to the nodes that should keep them and send those that are wanted.

        Of a page that several keep, the best answer counts. `REFUSED` also stands for a page that was dropped: no node, deadline, too much in flight.

        Payloads are sent without a copy and may still be read after a deadline or a cancellation:
        hand over buffers that nobody writes to any more.
        """
        if not len(headers) == len(payloads) == len(groups):
            raise ValueError(
                f"{len(headers)} headers, {len(payloads)} payloads, {len(groups)} groups"
            )
        pages = [id_of(header) for header in headers]
        sizes = [header.raw_bytes for header in headers]
        placed = [
            header if header.group == group else structs.replace(header, group=group)
            for header, group in zip(headers, groups, strict=True)
        ]
        became = [PutStatus.REFUSED] * len(pages)
        reasons: dict[int, Reason] = {}

        async def put(client: WireClient, positions: Sequence[int]) -> None:
            message = StoreWanted(
                new_request_id(), client.epoch, names(pages[at] for at in positions)
            )
            answers = await ask_statuses(client, message, None)
            wanted = []
            for at, answer in zip(positions, answers, strict=True):
                if answer == LookupStatus.MISS:
                    wanted.append(at)
                elif answer == LookupStatus.RETRY:
                    reasons[at] = Reason.BUSY
                else:
                    is_held = answer == LookupStatus.HIT
                    became[at] = min(became[at], PutStatus.HELD if is_held else PutStatus.PENDING)

            async def send(some: list[int]) -> None:
                message = PutPages(new_request_id(), client.epoch, tuple(placed[at] for at in some))
                async with self._budget.reserve(sum(sizes[at] for at in some)):
                    answers = await ask_statuses(
                        client, message, None, [payloads[at] for at in some]
                    )
                for at, answer in zip(some, answers, strict=True):
                    # The smaller, the better.
                    became[at] = min(became[at], PutStatus(answer))
                    if answer == PutStatus.REFUSED:
                        reasons[at] = Reason.BUSY
                    elif answer == PutStatus.STORED:
                        self.counters.stored_bytes += sizes[at]

            runs = list(by_bytes(wanted, sizes))
            await at_once(send, runs, min(len(runs), _PUTS_AT_ONCE))

        homes = self._homes(groups)
        copies = [(at, node) for at, order in enumerate(homes) for node in order]
        reasons = await self._spread(copies, put, deadline_s) | reasons
        for at, status in enumerate(became):
            self.counters.stored[status] += 1
            if status is PutStatus.REFUSED:
                nowhere = Reason.FAILED if homes[at] else Reason.NO_NODE
                self.counters.dropped[reasons.get(at, nowhere)] += 1
        return became

    async def close(self) -> None:
        """Drop all connections; loads in progress are misses."""
        await self._links.close()

    def _homes(self, groups: Sequence[PageKey]) -> list[list[PlaceRecord]]:
        """Return for each page the nodes that should keep it, best first."""
        nodes = self._links.nodes()
        placement = Placement(nodes, self._replication)
        return _by_group(groups, lambda group: [nodes[place] for place in placement.homes(group)])

    def _asked(self, groups: Sequence[PageKey]) -> list[list[PlaceRecord]]:
        """Return for each page the nodes that may have it, best first."""
        nodes = self._links.nodes()
        placement = Placement(nodes, self._replication)
        self._turn += 1
        turn = self._turn
        return _by_group(
            groups, lambda group: [nodes[place] for place in placement.asked(group, turn)]
        )

    async def _spread(
        self, places: Iterable[tuple[int, PlaceRecord]], work: _Work, deadline_s: float
    ) -> dict[int, Reason]:
        """Do `work` with all nodes at once; say for each position why a node failed, if one did."""
        failed: dict[int, Reason] = {}
        by_node: dict[PlaceId, tuple[PlaceRecord, list[int]]] = {}
        last: PlaceRecord | None = None
        positions: list[int] = []
        for at, record in places:
            # Pages of a group go to one node.
            if record is not last:
                last = record
                positions = by_node.setdefault(record.place, (record, []))[1]
            positions.append(at)

        async def with_node(record: PlaceRecord, positions: Sequence[int]) -> None:
            try:
                async with asyncio.timeout(deadline_s):
                    await work(await self._links.open(record), positions)
            except (WireError, TimeoutError, WrongAnswerError) as error:
                failed.update(dict.fromkeys(positions, _reason_of(error)))

        if len(by_node) == 1:
            for record, positions in by_node.values():
                await with_node(record, positions)
        else:
            async with asyncio.TaskGroup() as tasks:
                for record, positions in by_node.values():
                    tasks.create_task(with_node(record, positions))
        return failed

    async def _checked(
        self, page: PageId, answer: Message, frames: Sequence[memoryview]
    ) -> StoredPage | Reason:
        """Return the page that an answer brings, if it is that page and undamaged."""
        assert isinstance(answer, PageData)
        header = answer.header
        if answer.status != LookupStatus.HIT or header is None:
            return _NOT_HIT.get(answer.status, Reason.FAILED)
        if id_of(header) != page or len(frames) != 1:
            return Reason.BAD_PAGE
        payload = frames[0]
        if payload.nbytes <= _INLINE_BYTES:
            good = self._checksum.matches(header, payload)
        else:
            good = await asyncio.to_thread(self._checksum.matches, header, payload)
        if not good:
            return Reason.BAD_PAGE
        self._page_bytes = max(self._page_bytes, payload.nbytes)
        self._landing.saw(page.part, payload.nbytes)
        return StoredPage(header, payload)


def _by_group(
    groups: Sequence[PageKey], nodes_of: Callable[[PageKey], list[PlaceRecord]]
) -> list[list[PlaceRecord]]:
    """Return the nodes of each page; those of a group share a list."""
    found: list[list[PlaceRecord]] = []
    for group, run in groupby(groups):
        nodes = nodes_of(group)
        found.extend(nodes for _ in run)
    return found


def _most(orders: Iterable[Sequence[PlaceRecord]]) -> int:
    return max(map(len, orders), default=0)


_NOT_HIT: Mapping[int, Reason] = {
    LookupStatus.MISS: Reason.NOT_HELD,
    LookupStatus.PENDING: Reason.PENDING,
    LookupStatus.RETRY: Reason.BUSY,
}


def _position_of(answer: Message, count: int) -> int:
    """Return which of `count` pages an answer is about.

    Raises:
        WrongAnswerError: It is about none.
    """
    if isinstance(answer, PageData) and 0 <= answer.position < count:
        return answer.position
    raise WrongAnswerError


def _reason_of(error: Exception) -> Reason:
    """Return what a failed node counts as."""
    match error:
        case RefusedError(code=RefusalCode.STALE_EPOCH):
            return Reason.STALE_EPOCH
        case RefusedError():
            return Reason.REFUSED
        case PeerGone():
            return Reason.GONE
        case WireTimeout() | TimeoutError():
            return Reason.TIMEOUT
        case _:
            return Reason.FAILED

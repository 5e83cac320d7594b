"""Orders about pages on their way to places.

Covers sending them, and what became of each. Does not cover which orders are given
(`pie.policies.cluster_manager`) or what a worker does (`pie.worker.orders`).

A place that is gone, or does not answer, costs nothing: its order counts as not carried out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from pie.index.contract import PlaceRecord
from pie.page.events import Part, PlaceId, PlaceKind
from pie.policies.cluster_manager import ClusterEvent, Given
from pie.policies.cluster_policy import FetchPages, LetGo, MoveSession, StorePages
from pie.policies.order_checks import Holders, PageOrder, kept_by_workers
from pie.policies.order_limits import ANSWER_S
from pie.router.link import WorkerLink
from pie.router.nodes import NodeSet
from pie.wire import WireError, new_request_id
from pie.wire.orders import ChangeResult, PageChange, RemovePages
from pie.wire.place_orders import BringNear, LetGoOf, PagesMoved, StoreInPool

log = logging.getLogger("pie.router.ordering")

_NODE_ANSWER_S = 60.0
_MOST_UNDER_WAY = 32
_MOST_TOLD = 256
_REMOVED_AT_ONCE = 256


class Ordering:
    """Sends orders. For one event loop.

    Args:
        links: Connections to workers.
        records: Places that are up.
        nodes: Connections to pool nodes; closed with this.
        holders: Who has pages, for a last look before a pool node removes some; none is taken where None.
    """

    def __init__(
        self,
        links: Callable[[], Mapping[PlaceId, WorkerLink]],
        records: Callable[[], Mapping[PlaceId, PlaceRecord]] = dict,
        nodes: NodeSet | None = None,
        holders: Holders | None = None,
    ) -> None:
        self._links = links
        self._records = records
        self._nodes = nodes or NodeSet()
        self._holders = holders
        self._tasks: dict[asyncio.Task[None], PlaceId] = {}
        self._told: list[ClusterEvent] = []

    def send(self, given: Given) -> None:
        """Send an order; what becomes of it, `take_told` says later."""
        order = given.order
        assert not isinstance(order, MoveSession), "nobody is told of it"
        if len(self._tasks) >= _MOST_UNDER_WAY:
            self._tell(given.policy, "refuse", order, f"{_MOST_UNDER_WAY} orders are under way", 0)
            return
        task = asyncio.create_task(self._send(given.policy, order), name="pie-order")
        self._tasks[task] = order.place
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def take_told(self) -> list[ClusterEvent]:
        """Return what became of orders since the last call."""
        told, self._told = self._told, []
        return told

    async def close(self) -> None:
        """Wait for no answers any more; what workers have begun they finish."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._nodes.close()

    async def _send(self, policy: str, order: PageOrder) -> None:
        link, record = self._links().get(order.place), self._records().get(order.place)
        try:
            if link is not None:
                done = await self._ask(link, order)
            elif isinstance(order, LetGo) and record is not None:
                done = await self._remove(record, order)
            else:
                self._tell(policy, "fail", order, "there is no connection to it", 0)
                return
        except WireError as error:
            self._tell(policy, "fail", order, str(error), 0)
        except Exception as error:
            log.exception("an order to %s", order.place)
            self._tell(policy, "fail", order, f"{type(error).__name__}: {error}", 0)
        else:
            left = f", {done.left} are left" if done.left else ""
            moved = f", {done.bytes / (1 << 20):.1f} MiB" if done.bytes else ""
            self._tell(policy, "done", order, f"{_WHAT[type(order)]}{moved}{left}", done.pages)

    async def _ask(self, link: WorkerLink, order: PageOrder) -> PagesMoved:
        name, epoch, pages = new_request_id(), link.record.epoch, tuple(order.pages)
        match order:
            case StorePages():
                return await link.order(StoreInPool(name, epoch, pages), timeout_s=ANSWER_S)
            case FetchPages():
                return await link.order(BringNear(name, epoch, pages), timeout_s=ANSWER_S)
            case LetGo():
                message = LetGoOf(name, epoch, pages, order.start, order.also_last)
                return await link.order(message, timeout_s=ANSWER_S)

    async def _remove(self, record: PlaceRecord, order: LetGo) -> PagesMoved:
        """Let a pool node remove pages."""
        self._nodes.keep([one for one in self._records().values() if one.kind is PlaceKind.POOL])
        gone, left = 0, 0
        for at in range(order.start, len(order.pages), _REMOVED_AT_ONCE):
            end = min(at + _REMOVED_AT_ONCE, len(order.pages))
            some = order.pages[at : min(end, self._may_go(order))]
            left += end - at - len(some)
            if not some:
                continue
            # Which parts they have only their model knows: what is not there is not removed.
            named = tuple((key, int(part)) for key in some for part in Part)
            message = RemovePages(new_request_id(), record.epoch, named)
            answer = await self._nodes.request(record, message, _NODE_ANSWER_S)
            if not isinstance(answer, ChangeResult) or len(answer.changes) != len(named):
                raise WireError(f"it answered with {type(answer).__name__}")
            for number in range(len(some)):
                parts = answer.changes[number * len(Part) : (number + 1) * len(Part)]
                gone += PageChange.DONE in parts
                left += PageChange.IN_USE in parts
        return PagesMoved("", gone, left)

    def _may_go(self, order: LetGo) -> int:
        """Return up to which page a pool node may let go: workers may have let go of some since it was ordered."""
        if order.also_last or self._holders is None:
            return len(order.pages)
        leaving = {place for place, record in self._records().items() if record.draining}
        return kept_by_workers(self._holders.held(order.pages), leaving)

    def _tell(self, policy: str, action: str, order: PageOrder, reason: str, pages: int) -> None:
        self._told.append(ClusterEvent(policy, action, None, 0, reason, order.place, pages))
        del self._told[:-_MOST_TOLD]


_WHAT = {StorePages: "stored in the pool", FetchPages: "brought near", LetGo: "let go"}

"""The cluster as its policies are shown it.

Covers putting together places, conversations and what is asked for, and who has pages. Does not cover who asks
policies (`pie.router.conductor`, and in simulation `pie.simulator.conductor`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Protocol

from pie.index.contract import IndexReader, PlaceRecord
from pie.index.router_views import RouterView
from pie.page.events import Part, PlaceId, PlaceKind, Tier
from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey, RootKey
from pie.policies.cluster_policy import ClusterView, GroupView, PlaceView, SessionView, Wanted
from pie.policies.order_checks import HeldPages
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.policies.routing import divisible
from pie.policies.steps import at_once
from pie.router.books import WorkerBooks
from pie.router.conversations import Conversation, Conversations
from pie.router.demand import Demand
from pie.router.elsewhere import Elsewhere, seen
from pie.router.pauses import in_turns
from pie.router.rates import FleetRates
from pie.router.runs import Runs, pool_nodes

_SHOWN_GROUPS = 256
"""Groups that a policy is shown, beside those with more copies."""
_HOLDERS_SHOWN = 32
"""Groups of which a policy is shown who has them: those used most."""
SHOWN_SESSIONS = 1_024
"""Conversations that a policy is shown: the latest ones of this router, and of what others tell (`index.router_views`)."""
_GROUPS_AT_ONCE = 512
"""Groups that are gone through before others may have their turn: half a millisecond."""


class Index(IndexReader, Protocol):
    """What is needed of `pie.index.mirror.Mirror`."""

    def pages(self, place: PlaceId) -> Mapping[Tier, int]:
        """Return how many page parts a place holds in each tier."""
        ...


class Overview:
    """Looks at the cluster from one router. For one thread.

    Args:
        index: Places, and who has which page.
        books: What is known of each worker's load.
        demand: What is asked for.
        conversations: Where conversations are.
        elsewhere: What other routers see of both; nothing where None.
    """

    def __init__(
        self,
        index: Index,
        books: Callable[[], Mapping[PlaceId, WorkerBooks]],
        demand: Demand,
        conversations: Conversations,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self._index = index
        self._books = books
        self._demand = demand
        self.conversations = conversations
        self.elsewhere = elsewhere or Elsewhere()

    def seen(self, now_s: float) -> RouterView:
        """Return what this router sees, for others."""
        return seen(self._demand, self.conversations, now_s)

    def records(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are up."""
        return self._index.places()

    async def view(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted] | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> ClusterView:
        """Return what is known now. The event loop has its turn in between.

        Args:
            table: Groups with more copies than usual.
            now_s: Now, in seconds from anywhere.
            wanted: How many workers models should have, as was said last.
            prefixes: Those that the policy file names.
        """
        return await in_turns(self._look(table, now_s, wanted or {}, prefixes))

    def view_at_once(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted] | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> ClusterView:
        """Return the same, and let nobody else have a turn."""
        return at_once(self._look(table, now_s, wanted or {}, prefixes))

    def _look(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted],
        prefixes: Prefixes,
    ) -> Generator[None, None, ClusterView]:
        """Look at the cluster, and yield wherever others may have their turn."""
        records = list(self._index.places().values())
        pool = pool_nodes(self._index.places())
        nodes = [one for one in records if one.kind is PlaceKind.POOL and not one.draining]
        least = max((one.copies for one in nodes), default=1)
        uses, hottest = yield from self._uses(table, now_s)
        groups = []
        for some in _parts(dict.fromkeys([*table, *hottest])):
            groups += [self._group(one, uses[one], table.get(one, least)) for one in some]
            yield
        if len(prefixes):
            for at, group in enumerate(groups):
                groups[at] = replace(group, prefixes=self._prefixes_of(group.group, prefixes))
                yield
        groups.sort(key=lambda one: -one.uses_per_s)
        groups[:_HOLDERS_SHOWN] = yield from self._with_workers(groups[:_HOLDERS_SHOWN], pool)
        sessions = yield from self._sessions(now_s, pool)
        books = self._books()
        rates = FleetRates(one.rates for one in books.values())
        places = []
        for record in records:
            places.append(self._place(record, books.get(record.place), rates))
            yield
        return ClusterView(
            len(nodes), least, groups, now_s, places, sessions, wanted, prefixes.by_name()
        )

    def _uses(
        self, table: Mapping[PageKey, int], now_s: float
    ) -> Generator[None, None, tuple[Mapping[PageKey, float], Sequence[PageKey]]]:
        """Return how often groups are used, and which ones most."""
        demand, elsewhere = self._demand, self.elsewhere
        uses: dict[PageKey, float] = {}
        hottest: list[PageKey] = []
        for some in _parts(chain(table, demand.hottest(), elsewhere.groups)):
            more = [group for group in dict.fromkeys(some) if group not in uses]
            for group in more:
                uses[group] = demand.uses_per_s(group, now_s) + elsewhere.uses_per_s(group)
            hottest = heapq.nlargest(_SHOWN_GROUPS, [*hottest, *more], key=uses.__getitem__)
            yield
        return uses, hottest

    def held(self, pages: Sequence[PageKey]) -> HeldPages:
        """Do as `pie.policies.order_checks.Holders` says."""
        runs = Runs(self._index, pages)
        return HeldPages(runs.at_workers(), runs.pooled())

    def _prefixes_of(self, group: PageKey, prefixes: Prefixes) -> frozenset[str]:
        """Return the named prefixes that a group belongs to, whichever tenant's it is."""
        holder = self._demand.holder(group) or self.elsewhere.holder(group)
        # Up to its last page, and groups begin where those before them are full.
        pages = () if holder is None else holder.chain[: _first_of_last(holder.chain) + 1]
        if holder is None or not pages or pages[-1] != group:
            return prefixes.names_of_key(group)
        return prefixes.names_along(RootKey(holder.model_root), RootKey(holder.root), pages)

    def _group(self, group: PageKey, uses_per_s: float, copies: int) -> GroupView:
        holder = self._demand.holder(group) or self.elsewhere.holder(group)
        if holder is None:
            return GroupView(group, uses_per_s, copies)
        return GroupView(
            group,
            uses_per_s,
            copies,
            holder.chain,
            model_root=holder.model_root,
            tenant_tag=holder.tenant_tag,
            session_tag=holder.session_tag,
        )

    def _with_workers(
        self, groups: Sequence[GroupView], pool: Collection[PlaceId]
    ) -> Generator[None, None, list[GroupView]]:
        found = []
        for one in groups:
            if one.chain:
                held = Runs(self._index, one.chain, pool).at_workers()
                workers = [place for place, pages in held.items() if pages >= len(one.chain)]
                found.append(replace(one, workers=workers))
            else:
                found.append(one)
            yield
        return found

    def _place(
        self, record: PlaceRecord, books: WorkerBooks | None, rates: FleetRates
    ) -> PlaceView:
        if record.kind is not PlaceKind.WORKER:
            return PlaceView(record.place, record.kind, record.draining)
        parts = sum(part != Part.STATE for part in record.parts) or 1
        return PlaceView(
            record.place,
            record.kind,
            record.draining,
            record.model_root or b"",
            record.page_bytes,
            self._index.pages(record.place).get(Tier.DEVICE, 0) // parts,
            record.total_pages,
            used_share=0.0 if books is None else 1.0 - books.free_share,
            waiting=0 if books is None else books.waiting,
            running=0 if books is None else books.decoding,
            has_host=int(Tier.HOST) in record.tiers,
            model=record.model_name,
            wait_s=0.0
            if books is None
            else books.queued_tokens / divisible(rates.prefill_tokens_per_s(books.rates)),
        )

    def _sessions(
        self, now_s: float, pool: Collection[PlaceId]
    ) -> Generator[None, None, list[SessionView]]:
        found = []
        own = self.conversations.latest(SHOWN_SESSIONS)
        shown = yield from self.elsewhere.with_own(own, SHOWN_SESSIONS)
        for one in shown:
            self.elsewhere.note(one, now_s)
            yield
        for one in shown:
            found.append(self._session(one, now_s, pool))
            yield
        return found

    def _session(self, one: Conversation, now_s: float, pool: Collection[PlaceId]) -> SessionView:
        runs = Runs(self._index, one.keys, pool)
        records = self._index.places()
        held = {
            place: count
            for place, count in runs.at_workers().items()
            if records[place].model_root == one.root
        }
        return SessionView(
            one.tag,
            one.place,
            one.came_from,
            now_s - one.moved_at_s,
            0.0 if one.running else max(0.0, now_s - one.used_s),
            one.keys,
            held,
            runs.pooled(),
            max(self.conversations.shared_pages(one), self.elsewhere.shared_pages(one)),
            one.root or b"",
            one.tenant_tag,
        )


def _first_of_last(chain: Sequence[PageKey]) -> int:
    """Return where the last group of pages begins."""
    return (len(chain) - 1) // GROUP_PAGES * GROUP_PAGES


def _parts(groups: Iterable[PageKey]) -> Iterator[list[PageKey]]:
    """Yield groups, so many at a time that others wait for them no longer than they may."""
    left = iter(groups)
    while some := list(islice(left, _GROUPS_AT_ONCE)):
        yield some

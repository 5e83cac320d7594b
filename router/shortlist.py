"""The few of many workers among which a routing policy would choose.

Covers which workers hold alike, and leaving out those that others like them are less loaded than. Does not cover what
is less loaded (`pie.policies.shortlist`), or policies that are shown all (`pie.router.choice`).

Most of a thousand workers hold the same of a prompt: nothing, or the page that all prompts begin with. Such workers
differ in their load alone. So a policy is shown the least loaded of them, and each of those that differ in more: few
hold the same, or it has the conversation, or is computing pages of the prompt, or has shown a rate of its own.
`docs/design/0025-shortlists.md` has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pie.index.contract import PlaceRecord
from pie.index.mirror import LaneNumbers, Mirror
from pie.index.runs import MaskRun
from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.routing import RequestView, divisible
from pie.policies.shortlist import Alike, Shortlisting
from pie.router.books import WorkerBooks
from pie.router.fleet import Fleet, Rows
from pie.router.rates import ColumnRates
from pie.router.runs import Held, Runs, in_the_making, pool_nodes

MANY = 32
"""Of fewer workers it is cheaper to look at each."""
_FEW = 4
"""So few workers that hold alike are all shown."""
_FLEETS = 4
"""Sets of workers that are followed; more there are while some are retried without others."""


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Workers to show, by where they are among all, and what each could use."""

    workers: Sequence[tuple[int, Held]]
    runs: Runs
    rates: ColumnRates
    hot_pages: int


@dataclass(slots=True)
class _Group:
    held: Held
    rows: Rows


class Shortlister:
    """Makes shortlists from one index, following the workers that it is asked about.

    Args:
        index: Who holds which page.
        clock: As the books' one.
    """

    def __init__(self, index: Mirror, clock: Callable[[], float]) -> None:
        self._index = index
        self._clock = clock
        self._fleets: list[_Followed] = []
        self._places: Mapping[PlaceId, PlaceRecord] = {}
        self._nodes: Collection[PlaceId] = ()

    def of(
        self,
        policy: Shortlisting,
        request: RequestView,
        links: Sequence[WorkerBooks],
        *,
        latest: PlaceId | None,
        awaits: bool,
        hot_requests: int,
    ) -> Shortlist | None:
        """Return the workers to show; None where all are to be.

        Args:
            policy: Which will choose.
            request: What it is shown of the request, but for what is hot; its pages are named as the first worker does.
            links: All workers that could take the request.
            latest: The one that has the conversation.
            awaits: Whether workers may wait for pages that others compute.
            hot_requests: So many requests make a page hot.
        """
        followed = self._followed(links)
        fleet = followed.fleet
        rates = fleet.refresh()
        if not fleet.is_of_one_kind or len(fleet.row_of) < len(links):
            return None
        record, keys = fleet.links[0].record, request.keys
        found = self._index.alike(keys) if keys else []
        if found is None:
            return None
        runs = Runs(self._index, keys, self._pool_nodes(), followed.runs_of_nodes(found))
        groups, group_of = _groups(followed, runs, found, record)
        if awaits and self._nodes:
            # Waiting for pages can cost less the longer the queue is, so that all are held against each other.
            least = min(group.held.pages for group in groups)
            if least < len(keys) and fleet.makers(keys[least]):
                return None
        apart = _apart(fleet, keys, groups, group_of, rates, latest)
        shown = apart.copy()
        for group in groups:
            rest = group.rows[~apart[group.rows]]
            if not len(rest):
                continue
            if len(rest) <= _FEW:
                shown[rest] = True
                continue
            chosen = rest[policy.likely(request, _alike(fleet, rest, rates))]
            shown[chosen] = True
            if len(chosen) == 1:
                # Another one stands for all the others, for those who ask what they hold.
                shown[rest[1] if rest[0] == chosen[0] else rest[0]] = True
        workers = []
        for row in shown.nonzero()[0].tolist():
            held = groups[group_of[row]].held
            making = fleet.links[row].pages_in_making(keys) if apart[row] else 0
            workers.append((row, in_the_making(held, making) if making else held))
        return Shortlist(workers, runs, rates, fleet.hot_pages(keys, hot_requests))

    def _pool_nodes(self) -> Collection[PlaceId]:
        places = self._index.places()
        if places is not self._places:
            self._places, self._nodes = places, pool_nodes(places)
        return self._nodes

    def _followed(self, links: Sequence[WorkerBooks]) -> _Followed:
        lanes = self._index.lanes()
        for at, one in enumerate(self._fleets):
            if one.links is links or one.fleet.links == links:
                if at:
                    self._fleets.insert(0, self._fleets.pop(at))
                if one.lanes is not lanes:
                    one.lanes_changed(lanes, self._pool_nodes())
                return one
        if len(self._fleets) >= _FLEETS:
            self._fleets.pop().fleet.close()
        one = _Followed(links, Fleet(links, clock=self._clock), lanes, self._pool_nodes())
        self._fleets.insert(0, one)
        return one


class _Followed:
    """A fleet, and how its workers are numbered in the index."""

    def __init__(
        self,
        links: Sequence[WorkerBooks],
        fleet: Fleet,
        lanes: Mapping[PlaceId, int],
        nodes: Collection[PlaceId],
    ) -> None:
        self.links = links
        self.fleet = fleet
        self.lanes_changed(lanes, nodes)

    def lanes_changed(self, lanes: Mapping[PlaceId, int], nodes: Collection[PlaceId]) -> None:
        """Learn of other numbers."""
        self.lanes = lanes
        self._nodes = {lane: place for place, lane in lanes.items() if place in nodes}
        width = max(lanes.values(), default=-1) + 1
        self._row_of_lane = np.full(width, -1, np.int64)
        self._is_node = np.zeros(width, np.bool_)
        for place, lane in lanes.items():
            self._row_of_lane[lane] = self.fleet.row_of.get(place, -1)
            self._is_node[lane] = place in nodes

    def rows(self, lanes: LaneNumbers) -> Rows:
        """Return the rows of workers; of others there are none."""
        rows: Rows = self._row_of_lane[lanes]
        return rows if (rows >= 0).all() else rows[rows >= 0]

    def runs_of_nodes(
        self, found: Sequence[tuple[MaskRun, LaneNumbers]]
    ) -> Mapping[PlaceId, MaskRun]:
        """Return what pool nodes hold, in the order in which the index has them."""
        if not self._nodes:
            return {}
        runs = {lane: run for run, lanes in found for lane in lanes[self._is_node[lanes]].tolist()}
        return {place: runs[lane] for lane, place in self._nodes.items() if lane in runs}


def _groups(
    followed: _Followed,
    runs: Runs,
    found: Sequence[tuple[MaskRun, LaneNumbers]],
    record: PlaceRecord,
) -> tuple[list[_Group], Rows]:
    """Return the workers that hold alike, and of each worker which ones it belongs to."""
    group_of = np.full(len(followed.fleet.links), -1, np.int64)
    groups: list[_Group] = []
    for run, lanes in found:
        rows = followed.rows(lanes)
        if len(rows):
            group_of[rows] = len(groups)
            groups.append(_Group(runs.stored(run, record), rows))
    rows = (group_of < 0).nonzero()[0]
    if len(rows):
        group_of[rows] = len(groups)
        groups.append(_Group(runs.stored(None, record), rows))
    return groups, group_of


def _apart(
    fleet: Fleet,
    keys: Sequence[PageKey],
    groups: Sequence[_Group],
    group_of: Rows,
    rates: ColumnRates,
    latest: PlaceId | None,
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which workers differ in more than their load from those that hold alike."""
    tiers = {tier for group in groups for tier in group.held.load_pages}
    apart = rates.apart(tiers)
    if latest is not None and (row := fleet.row_of.get(latest)) is not None:
        apart[row] = True
    has_pages = np.array([group.held.device_pages for group in groups], np.int64)
    for next_page in set(has_pages.tolist()):
        makers = fleet.makers(keys[next_page]) if next_page < len(keys) else ()
        # Who computes a page computes those before it, or has them.
        if makers:
            rows = np.fromiter(makers, np.int64, len(makers))
            apart[rows[has_pages[group_of[rows]] == next_page]] = True
    return apart


def _alike(fleet: Fleet, rows: Rows, rates: ColumnRates) -> Alike:
    running, per_s = fleet.running[rows], rates.fleet_prefill_tokens_per_s
    return Alike(
        names=fleet.names,
        rows=rows,
        prefill_tokens_per_s=per_s,
        wait_ms=np.maximum(fleet.queued_tokens[rows], 0) * 1000 / divisible(per_s),
        in_flight=fleet.waiting[rows] + running,
        running=running,
        decode_step_ms=fleet.decode_step_ms[rows],
    )

"""Why an order of a cluster policy cannot be carried out, and what is left of it where it can.

Covers each order by itself, against what the cluster looks like; pure. Does not cover how much may be ordered at
a time (`pie.policies.cluster_manager`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    LetGo,
    MoveSession,
    PlaceView,
    SetCopies,
    StorePages,
    WantWorkers,
)
from pie.policies.order_limits import MOST_PAGES, MOST_SEQUENCE_PAGES

MOST_WORKERS = 10_000

PageOrder = StorePages | FetchPages | LetGo


@dataclass(frozen=True, slots=True)
class HeldPages:
    """Who has pages."""

    workers: Mapping[PlaceId, int]
    """By worker how many leading pages it has, in any tier; those that have none may be left out."""
    pooled: int
    """How many leading pages pool nodes have together."""


class Holders(Protocol):
    """Knows who has pages now."""

    def held(self, pages: Sequence[PageKey]) -> HeldPages:
        """Return who has leading pages: some milliseconds where there are many."""
        ...


def kept_by_workers(found: HeldPages, leaving: Collection[PlaceId]) -> int:
    """Return how many leading pages one worker has that is not about to leave."""
    return max((pages for place, pages in found.workers.items() if place not in leaving), default=0)


def bad_copies(order: SetCopies, view: ClusterView) -> str:
    """Return why a number of copies cannot be; nothing where it can."""
    if order.copies < view.least_copies:
        return f"every page has {view.least_copies} copies at least"
    if order.copies > max(view.nodes, view.least_copies):
        return f"there are {view.nodes} nodes"
    return ""


def bad_hint(order: WantWorkers, view: ClusterView) -> str:
    """Return why a model cannot have so many workers; nothing where it can."""
    if not 0 <= order.workers <= MOST_WORKERS:
        return f"a model has 0 to {MOST_WORKERS:,} workers"
    known = order.model in view.wanted or any(
        one.kind is PlaceKind.WORKER and one.model == order.model for one in view.places
    )
    return "" if known else f"there is no worker of a model {order.model}"


def bad_move(order: MoveSession, view: ClusterView) -> str:
    """Return why a conversation cannot move; nothing where it can."""
    session = next((one for one in view.sessions if one.session == order.session), None)
    place = view.place(order.place)
    if session is None:
        return f"there is no conversation {order.session}"
    if place is None or place.kind is not PlaceKind.WORKER:
        return f"there is no worker {order.place}"
    if place.draining:
        return f"{order.place} is leaving"
    if place.model_root != session.model_root:
        return f"{order.place} has another model"
    if session.place == order.place:
        return f"it is at {order.place} already"
    return ""


def bad_pages(order: PageOrder, view: ClusterView) -> str:
    """Return why an order about pages is refused whoever has them; nothing where it is not."""
    place = view.place(order.place)
    refused = ""
    if place is None or (place.kind is not PlaceKind.WORKER and not isinstance(order, LetGo)):
        refused = f"there is no worker {order.place}"
    elif len(order.pages) > MOST_SEQUENCE_PAGES:
        refused = f"it is about more than {MOST_SEQUENCE_PAGES:,} pages"
    elif len(set(order.pages)) < len(order.pages):
        refused = "it names a page twice"
    elif isinstance(order, LetGo):
        refused = "" if 0 <= order.start < len(order.pages) else "it is about no page"
    elif not view.nodes:
        refused = "no pool node is up"
    elif isinstance(order, FetchPages) and place.draining:
        refused = f"{order.place} is leaving"
    elif isinstance(order, FetchPages) and not place.has_host:
        refused = f"{order.place} keeps nothing in host memory"
    return refused


def looked_up(
    order: PageOrder, view: ClusterView, holders: Holders, before: int = 0
) -> tuple[str, PageOrder, int]:
    """Look up who has an order's pages, of which `bad_pages` says nothing.

    Args:
        order: What is proposed.
        view: What the cluster looks like.
        holders: Who has pages.
        before: Of pages that go in parts, where the part begins that was given last; 0 where none was.

    Returns:
        Why it is refused, or nothing; what is left of it, `MOST_PAGES` at most; how many bytes move.
    """
    place = view.place(order.place)
    assert place is not None, "bad_pages was asked"
    if isinstance(order, LetGo):
        refused, left = _letting_go(order, place, view, holders, before)
        return refused, left, 0
    found = holders.held(order.pages)
    here = found.workers.get(order.place, 0)
    if isinstance(order, StorePages):
        there, held, why = found.pooled, here, "the pool has what is there"
    else:
        there, held, why = here, found.pooled, "the pool has no more than is there"
    if held <= there:
        return why, order, 0
    # Parts have fixed ends, so that one that is half done is the same one.
    first = there // MOST_PAGES * MOST_PAGES
    last = min(held, first + MOST_PAGES)
    return "", replace(order, pages=order.pages[first:last]), (last - there) * place.page_bytes


def _letting_go(
    order: LetGo, place: PlaceView, view: ClusterView, holders: Holders, before: int
) -> tuple[str, LetGo]:
    """Return why a place does not let go, or nothing; and what of it leaves: the last part first.

    Only of all pool nodes together is it known what they have, so that a part which one node let go of may
    be there still, at another: at nodes the parts go by turns, whatever became of them.
    """
    has_parts = len(order.pages) > MOST_PAGES
    if order.also_last and not has_parts:
        return "", order
    found, is_node = holders.held(order.pages), place.kind is PlaceKind.POOL
    last = len(order.pages)
    if not order.also_last:
        leaving = {one.place for one in view.places if one.draining}
        last = kept_by_workers(found, leaving) if is_node else found.pooled
        if last <= order.start:
            return "they are the last copies", order
    if has_parts:
        last = min(last, found.pooled if is_node else found.workers.get(order.place, 0))
        if last <= order.start:
            return "it has none of them", order
        if is_node and before > order.start:
            last = min(last, before)
    first = (last - 1) // MOST_PAGES * MOST_PAGES
    start = max(0, order.start - first)
    return "", replace(order, pages=order.pages[first:last], start=start)

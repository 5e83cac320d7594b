"""What a node has to hand to others so that every page lies where it belongs.

Covers the plan of one node: which of its pages which other nodes should have, and which it need not
keep. Pure. Does not cover where pages belong (`pie.pool.placement`) or sending them
(`pie.pool.migration`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pie.page.events import PlaceId
from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.pool.placement import Placement
from pie.pool.tier import PageId, id_of


@dataclass(frozen=True, slots=True)
class GroupMove:
    """Pages of one group that other nodes should have."""

    group: PageKey
    pages: tuple[PageId, ...]
    """In the order of the sequence, so that a move that breaks off leaves a leading run."""
    targets: tuple[PlaceId, ...]
    """The other nodes that should keep them, best first."""
    leaves: bool
    """Whether this node should not: its copies go as soon as every target has its own."""


def plan(headers: Iterable[PageHeader], here: PlaceId, placement: Placement) -> list[GroupMove]:
    """Return what the node `here`, which holds `headers`, has to hand to others.

    What came last is first: a node that has little time left hands on what was used last. Pages of which
    no group is known stay where they are, and so do all where no node takes pages.
    """
    # Nothing is kept of a page that belongs here alone: a node may hold millions.
    targets: dict[bytes, tuple[PlaceId, ...]] = {}
    groups: dict[bytes, list[tuple[int, PageId]]] = {}
    for header in headers:
        group = header.group
        if not group:
            continue
        if group not in targets:
            homes = placement.homes(PageKey(group))
            targets[group] = tuple(place for place in homes if place != here)
        if targets[group]:
            groups.setdefault(group, []).append((header.index, id_of(header)))
    moves: list[GroupMove] = []
    for group, held in groups.items():
        held.sort(key=lambda one: (one[0], one[1].part))
        pages = tuple(page for _, page in held)
        leaves = here not in placement.homes(PageKey(group))
        moves.append(GroupMove(PageKey(group), pages, targets[group], leaves))
    moves.reverse()
    return moves

"""Which pool node keeps which page.

Covers weighted rendezvous hashing, and which of the nodes that are up keep a group of pages and are asked for it.
Pure. Does not cover groups (`pie.page.groups`), which nodes are alive (`pie.index`) or how many keep a page
(`pie.policies.replication`).

Pages of a group lie on one node, so that a leading run is read with few requests; groups of one
sequence spread over all nodes. A node that comes or goes moves only the groups that it wins or
held. See D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from blake3 import blake3

from pie.index.contract import PlaceRecord
from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.replication import ReplicationPolicy

_MORE_ASKED = 3
"""So many nodes may come at once without a page being missed that is still where it was before them."""


def rank(group: PageKey, weights: Mapping[PlaceId, float]) -> list[PlaceId]:
    """Return the nodes in the order in which they should keep `group`, best first.

    Args:
        group: The first key of a group.
        weights: Each node's share; a node of weight 2 keeps twice the groups of one of weight 1.
            Nodes without weight keep nothing.
    """
    if len(weights) == 1:
        return [place for place, weight in weights.items() if weight > 0]
    scored = [
        (_score(group, place, weight), place) for place, weight in weights.items() if weight > 0
    ]
    return [place for _, place in sorted(scored, key=lambda pair: (-pair[0], pair[1]))]


def _score(group: PageKey, place: PlaceId, weight: float) -> float:
    """Return the logarithmic score of weighted rendezvous hashing, larger is better."""
    digest = blake3(group + place.encode()).digest(8)
    # In (0, 1): 53 bits fit a float exactly, and a half keeps 0 and 1 out.
    uniform = ((int.from_bytes(digest, "little") >> 11) + 0.5) / (1 << 53)
    return -weight / math.log(uniform)


def view_of(records: Mapping[PlaceId, PlaceRecord]) -> str:
    """Return what of the nodes says where pages belong, and who may have lost some, as a digest."""
    seen = sorted(
        (place, record.epoch, record.capacity_bytes, record.draining)
        for place, record in records.items()
    )
    return blake3(repr(seen).encode()).hexdigest(16)


class Placement:
    """Which of the nodes that are up keep a group, and which of them are asked for it.

    The nodes that keep it, its homes, are the first of those that take pages. Asked are the first of
    all nodes, and one more than keep it: the one that kept it until a better one came, or that keeps it
    while a better one leaves. Where several came at once, the one that kept it is further down: so of
    the next ones those are asked too that have not yet said that they handed on what belongs to others.
    A node that is leaving takes no pages and is asked for those it still has.
    """

    def __init__(
        self,
        records: Mapping[PlaceId, PlaceRecord],
        replication: ReplicationPolicy,
    ) -> None:
        self._weights = {
            place: float(max(1, record.capacity_bytes)) for place, record in records.items()
        }
        self._takers = {place for place, record in records.items() if not record.draining}
        view = view_of(records)
        self._unsettled = {place for place, record in records.items() if record.settled != view}
        self._replication = replication

    def homes(self, group: PageKey) -> list[PlaceId]:
        """Return the nodes that should keep a group, best first."""
        order = [place for place in rank(group, self._weights) if place in self._takers]
        return order[: self._replication.copies(group, len(order))]

    def asked(self, group: PageKey, turn: int = 0) -> list[PlaceId]:
        """Return the nodes that may have a group, in the order in which they should be asked.

        Of those that keep it another is the first for another `turn`, so that copies share the load.
        """
        order = rank(group, self._weights)
        copies = self._replication.copies(group, len(self._takers))
        turn %= copies
        homes, others = order[:copies], order[copies:]
        further = others[1 : 1 + _MORE_ASKED]
        return [
            *homes[turn:],
            *homes[:turn],
            *others[:1],
            *(place for place in further if place in self._unsettled),
        ]

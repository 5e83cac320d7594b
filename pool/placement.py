"""Which pool node keeps which page.

Covers groups of consecutive pages and weighted rendezvous hashing. Pure. Does not cover which
nodes are alive (`pie.index`).

Pages of a group lie on one node, so that a leading run is read with few requests; groups of one
sequence spread over all nodes. A node that comes or goes moves only the groups that it wins or
held. See D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates", 1998.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from blake3 import blake3

from pie.page.events import PlaceId
from pie.page.key import PageKey

GROUP_PAGES = 32


def group_keys(chain: Sequence[PageKey]) -> list[PageKey]:
    """Return for each page of a sequence the first key of its group.

    Args:
        chain: The keys of the sequence from its first page on.
    """
    return [chain[i - i % GROUP_PAGES] for i in range(len(chain))]


def rank(group: PageKey, weights: Mapping[PlaceId, float]) -> list[PlaceId]:
    """Return the nodes in the order in which they should keep `group`, best first.

    Args:
        group: The first key of a group.
        weights: Each node's share; a node of weight 2 keeps twice the groups of one of weight 1.
            Nodes without weight keep nothing.
    """
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

"""Pages that another worker is computing, and when the pool will have them.

Covers what a worker could wait for instead of computing it too. Pure. Does not cover whether that is
worth it (`pie.policies.routing`) or the wait itself (`pie.worker.awaiting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie.page.events import Part, PlaceId
from pie.page.key import PageKey
from pie.policies.routing import TWICE_COMPUTED
from pie.router.books import WorkerBooks
from pie.router.rates import FleetRates

_LEAST_S = 0.25
"""Pages travel to the pool behind the steps that made them: a wait that is over sooner is not measured."""
_LATE = 2.0
"""How many times its estimate a wait may take: rates of a busy machine vary by half."""


@dataclass(frozen=True, slots=True)
class Coming:
    """A prompt's leading pages that a worker has in the making."""

    place: PlaceId
    pages: int
    ms: float
    """About so long until they are computed."""


def in_making(
    link: WorkerBooks, keys: Sequence[PageKey], pages: int, rates: FleetRates
) -> Coming | None:
    """Return when a worker has computed the first `pages` pages; None where nobody computes them there."""
    if not pages or Part.STATE in link.record.parts:
        return None
    tokens = link.tokens_until(keys[pages - 1], pages - 1)
    if tokens is None:
        return None
    ms = tokens * 1e3 / rates.prefill_tokens_per_s(link.rates) - link.busy_s * 1e3
    return Coming(link.record.place, pages, max(ms, 0.0))


def for_worker(place: PlaceId, coming: Sequence[Coming]) -> Coming | None:
    """Return what a worker could wait for: the most pages that another one makes, soonest."""
    others = (one for one in coming if one.place != place)
    return max(others, key=lambda one: (one.pages, -one.ms), default=None)


def longest_wait_s(coming_ms: float, compute_ms: float) -> float:
    """Return how long a worker waits at most: no longer than made the wait worth it."""
    return min(max(_LATE * coming_ms / 1e3, _LEAST_S), TWICE_COMPUTED * compute_ms / 1e3)

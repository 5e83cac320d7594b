"""`round-robin`, `least-loaded` and `power-of-two`: routing that does not look at pages.

Covers three built-in policies to compare with, and for those who want no affinity. Does not cover
policies that know what workers hold (`pie.policies.routing_cost`, `.routing_affinity`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.page.events import PlaceId
from pie.policies.routing import Choice, RequestView, WorkerView, by_load, lot
from pie.policies.shortlist import Alike, Positions


class RoundRobinRouting:
    """Each worker in turn, by name."""

    def __init__(self) -> None:
        self._last = PlaceId("")

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:  # noqa: ARG002
        """Return the worker whose name comes next."""
        places = sorted(worker.place for worker in workers)
        self._last = next((place for place in places if place > self._last), places[0])
        return Choice(self._last)


class LeastLoadedRouting:
    """The worker that can begin soonest: the shortest wait, then the fewest requests."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the least loaded worker."""
        return Choice(min(workers, key=lambda worker: by_load(request, worker)).place)

    def likely(self, request: RequestView, workers: Alike) -> Positions:
        """Return the least loaded one of some that differ in their load alone."""
        likely = (workers.wait_ms == workers.wait_ms.min()).nonzero()[0]
        fewest = workers.in_flight[likely]
        return workers.first_of_equals(request, likely[fewest == fewest.min()])


class PowerOfTwoRouting:
    """The less loaded of two workers that are drawn for each request.

    Nearly as even as asking all, and routers that do not know of each other's requests do not all
    choose the same one (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing").
    """

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the less loaded of two."""
        drawn = sorted(workers, key=lambda worker: lot(request.request_id, worker.place))[:2]
        return Choice(min(drawn, key=lambda worker: by_load(request, worker)).place)

"""`prefix-affinity` and `consistent-hash`: routing by prefix or conversation, with a bound on load.

Covers two built-in policies. Does not cover the default, which weighs affinity against waiting
(`pie.policies.routing_cost`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pie.policies.routing import Choice, RequestView, WorkerView, by_load, lot
from pie.policies.units import Count, Ratio


class PrefixAffinityRouting:
    """The worker with the longest match, where it is long enough; else the least loaded.

    The threshold rule of routers that know prefixes and count requests (SGLang's cache-aware router
    made it known), with one difference: a miss goes by load, never to the emptiest cache.

    Args:
        threshold: Least share of the prompt that must be held, from 0 to 1.
        imbalance_requests: Where the busiest worker has more requests than the idlest by more than
            this, and by `imbalance_ratio`, the least loaded takes the request.
        imbalance_ratio: How many times as many.
    """

    def __init__(
        self,
        *,
        threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.3,
        imbalance_requests: Annotated[int, Field(ge=0, lt=1 << 31)] = 64,
        imbalance_ratio: Ratio = 1.5,
    ) -> None:
        self._threshold = threshold
        self._imbalance_requests = imbalance_requests
        self._imbalance_ratio = imbalance_ratio

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker with the longest match that counts, or the least loaded."""
        loads = [worker.in_flight for worker in workers]
        most, least = max(loads), min(loads)
        uneven = most - least > self._imbalance_requests and most > least * self._imbalance_ratio
        longest = max(worker.held_tokens for worker in workers)
        if uneven or not longest or longest < self._threshold * request.prompt_tokens:
            longest = 0
        candidates = [worker for worker in workers if worker.held_tokens >= longest]
        return Choice(min(candidates, key=lambda worker: by_load(request, worker)).place)


class ConsistentHashRouting:
    """The worker that a hash of the conversation names, or of the prompt's first pages.

    Rendezvous hashing, so that a worker that comes or goes moves only its own share, with bounded
    loads (Mirrokni, Thorup and Zadimoghaddam): a worker that has more than its share passes the
    request on to the next in its row.

    Args:
        pages: How many leading pages are hashed where the request names no conversation.
        most_load: How many times the mean number of requests a worker may have.
    """

    def __init__(self, *, pages: Count = 1, most_load: Ratio = 1.25) -> None:
        self._pages = pages
        self._most_load = most_load

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the first worker in the row of this conversation or prefix that has room."""
        name = self._name(request)
        row = sorted(workers, key=lambda worker: (lot(name, worker.place), worker.place))
        mean = (sum(worker.in_flight for worker in workers) + 1) / len(workers)
        most = math.ceil(self._most_load * mean)
        # The least loaded one has room: `most` is above the mean.
        return Choice(next(worker.place for worker in row if worker.in_flight < most))

    def _name(self, request: RequestView) -> str:
        if request.session is not None:
            return request.session
        if not request.keys:
            return request.request_id
        # A key names everything before it too.
        return request.keys[min(self._pages, len(request.keys)) - 1].hex()

"""`weighted`: filters leave some candidates, scorers rate them, a picker takes one.

Covers the built-in policy for those who think in points, as schedulers of the Gateway API do. Does
not cover the default, which thinks in milliseconds (`pie.policies.routing_cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from pie.policies.routing import Choice, RequestView, WorkerView, by_load, lot
from pie.policies.units import NonNegative

Scorer = Literal["prefix", "queue", "running", "free-memory", "session"]
"""`prefix`: the share of the prompt that is held; `queue` and `running`: the fewer requests wait or
decode the better, beside the other candidates; `free-memory`: the share of device memory that is free
or only kept for later; `session`: 1 for the worker of the conversation's latest request."""

Filter = Literal["max-wait-ms", "max-requests", "least-free-memory"]
"""What a candidate must keep to: longest wait, most requests, least share of free memory."""

Picker = Literal["best", "weighted-random"]
"""The best score, or a draw with the scores as chances."""

_SCORERS: Mapping[Scorer, float] = {"prefix": 3.0, "queue": 2.0, "free-memory": 2.0}
"""The weights that llm-d ships."""

_PASSES: Mapping[Filter, Callable[[WorkerView, float], bool]] = {
    "max-wait-ms": lambda worker, limit: worker.wait_ms <= limit,
    "max-requests": lambda worker, limit: worker.in_flight <= limit,
    "least-free-memory": lambda worker, limit: worker.free_share >= limit,
}


class WeightedRouting:
    """The best sum of weighted scores, each from 0 to 1.

    Args:
        filters: Limits; those who keep to none of them are candidates only where nobody does.
        scorers: Weights.
        picker: How one is taken.
    """

    def __init__(
        self,
        *,
        filters: dict[Filter, NonNegative] | None = None,
        scorers: dict[Scorer, NonNegative] | None = None,
        picker: Picker = "best",
    ) -> None:
        self._filters = dict(filters or {})
        self._scorers = dict(_SCORERS if scorers is None else scorers)
        self._picker = picker

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker that the picker takes."""
        candidates: Sequence[WorkerView] = workers
        for name, limit in self._filters.items():
            candidates = [w for w in candidates if _PASSES[name](w, limit)] or candidates
        scores = {worker.place: self._score(request, worker, candidates) for worker in candidates}
        ranked = sorted(candidates, key=lambda w: (-scores[w.place], by_load(request, w)))
        total = sum(scores.values())
        if self._picker == "best" or total <= 0:
            return Choice(ranked[0].place)
        drawn = int.from_bytes(lot(request.request_id, "")) / 2**64 * total
        for worker in ranked:
            drawn -= scores[worker.place]
            if drawn < 0:
                return Choice(worker.place)
        return Choice(ranked[-1].place)

    def _score(
        self, request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]
    ) -> float:
        return sum(
            weight * _scored(name, request, worker, candidates)
            for name, weight in self._scorers.items()
        )


def _scored(
    name: Scorer, request: RequestView, worker: WorkerView, candidates: Sequence[WorkerView]
) -> float:
    """Return one score, from 0 to 1."""
    match name:
        case "prefix":
            return min(1.0, worker.held_tokens / max(request.prompt_tokens, 1))
        case "queue":
            return _fewest(worker.waiting, [other.waiting for other in candidates])
        case "running":
            return _fewest(worker.running, [other.running for other in candidates])
        case "free-memory":
            return min(1.0, max(0.0, worker.free_share))
        case "session":
            return float(worker.has_session)


def _fewest(own: int, all_of_them: Sequence[int]) -> float:
    """Return 1 for the fewest and 0 for the most."""
    least, most = min(all_of_them), max(all_of_them)
    return 1.0 if most == least else (most - own) / (most - least)

"""Rules of other routers, to compare with: as their documents describe them, over what Pie knows.

Covers five routing policies, named in a policy file as `pie.simulator.peers:Class`. They are not
built-ins: each was the best rule of its router, and none should route for Pie. All of them are shown
Pie's index here, which is more exact than the approximations that some of them keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from pie.policies.routing import Choice, RequestView, WorkerView, by_load, lot
from pie.policies.routing_plain import PowerOfTwoRouting
from pie.policies.routing_weighted import WeightedRouting
from pie.policies.units import Count, NonNegative

NAMES = (
    "SglangThreshold",
    "RayPrefixAffinity",
    "LlmdWeighted",
    "ProductionStackLoadAware",
    "DynamoCost",
)
"""All of them."""

PartOfPrompt = Annotated[float, Field(ge=0, le=1)]
"""From nothing of a prompt to all of it."""

Requests = Annotated[int, Field(ge=0, lt=1 << 31)]
"""A number of requests."""


class SglangThreshold:
    """SGLang's cache-aware router: the longest match, else the smallest cache; uneven load goes first.

    As its documents say (`--cache-threshold`, `--balance-abs-threshold`, `--balance-rel-threshold` of
    `sglang-router`, with its defaults): load is uneven where both thresholds are passed.

    Args:
        cache_threshold: Least share of the prompt that must match.
        balance_abs_threshold: How many more requests the busiest may have than the idlest.
        balance_rel_threshold: And how many times as many.
    """

    def __init__(
        self,
        *,
        cache_threshold: PartOfPrompt = 0.3,
        balance_abs_threshold: Requests = 64,
        balance_rel_threshold: NonNegative = 1.5,
    ) -> None:
        self._cache_threshold = cache_threshold
        self._balance_abs_threshold = balance_abs_threshold
        self._balance_rel_threshold = balance_rel_threshold

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker that the rule names."""
        loads = [worker.in_flight for worker in workers]
        most, least = max(loads), min(loads)
        uneven = most - least > self._balance_abs_threshold
        if uneven and most > least * self._balance_rel_threshold:
            return Choice(_fewest(request, workers).place)
        best = max(workers, key=lambda worker: (worker.held_tokens, _tie(request, worker)))
        if best.held_tokens > self._cache_threshold * request.prompt_tokens:
            return Choice(best.place)
        return Choice(_emptiest(request, workers).place)


class RayPrefixAffinity:
    """Ray Serve's PrefixCacheAffinityRouter: the longest match of a tenth, else the emptiest cache.

    As docs.ray.io has it under "PrefixCacheAffinityRouter for LLM inference optimization": load balance check,
    prefix matching, and a draw of two where load is not balanced.

    Args:
        imbalanced_threshold: So many more requests of the busiest than of the idlest are too many: two are drawn,
            and the less loaded takes the request. Fewer are balanced load. None, as there by default, for never.
        match_rate_threshold: Least share of the prompt that must match.
    """

    def __init__(
        self,
        *,
        imbalanced_threshold: NonNegative | None = None,
        match_rate_threshold: PartOfPrompt = 0.1,
    ) -> None:
        self._imbalanced_threshold = imbalanced_threshold
        self._match_rate_threshold = match_rate_threshold
        self._draw = PowerOfTwoRouting()

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker that the rule names."""
        loads = [worker.in_flight for worker in workers]
        limit = self._imbalanced_threshold
        # Balanced is load whose difference is below the threshold.
        if limit is not None and max(loads) - min(loads) >= limit:
            return self._draw.choose(request, workers)
        best = max(workers, key=lambda worker: (worker.held_tokens, _tie(request, worker)))
        if best.held_tokens >= self._match_rate_threshold * request.prompt_tokens:
            return Choice(best.place)
        return Choice(_emptiest(request, workers).place)


class LlmdWeighted(WeightedRouting):
    """llm-d's default profile: prefix 3, KV-cache utilisation 2, queue 2, and the best score.

    The weights are those of the endpoint picker's default configuration (`prefix-cache-scorer`,
    `kv-cache-utilization-scorer`, `queue-scorer`, `max-score-picker`), of its inference scheduler.
    """

    def __init__(self) -> None:
        super().__init__(scorers={"prefix": 3.0, "free-memory": 2.0, "queue": 2.0})


class ProductionStackLoadAware:
    """vLLM production-stack's load-aware routing: matched share less `beta` times relative load.

    The formula and the default are those of its pull request 1035 (`loadaware`).

    Args:
        beta: What a load twice the mean costs, in shares of the prompt.
    """

    def __init__(self, *, beta: NonNegative = 1.0) -> None:
        self._beta = beta

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker with the best score."""
        mean = sum(worker.in_flight for worker in workers) / len(workers)

        def score(worker: WorkerView) -> float:
            matched = worker.held_tokens / max(request.prompt_tokens, 1)
            return matched - self._beta * (worker.in_flight - mean) / max(1.0, mean)

        return Choice(max(workers, key=lambda one: (score(one), _tie(request, one))).place)


class DynamoCost:
    """NVIDIA Dynamo's KV router: fewest pages to compute and to keep, at temperature 0.

    As docs.nvidia.com has it under "Router Design": potential prefill blocks, weighted, and potential active
    blocks. Later releases count pages below device memory in part, which is left out.

    Its cost is `overlap_weight` × pages of prefill, this request's and those that wait, + pages that are
    in use.

    Args:
        overlap_weight: Weight of prefill.
        worker_pages: Pages of a worker, from which those in use are told.
    """

    def __init__(self, *, overlap_weight: NonNegative = 1.0, worker_pages: Count = 4_096) -> None:
        self._overlap_weight = overlap_weight
        self._worker_pages = worker_pages

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker with the lowest cost."""

        def cost(worker: WorkerView) -> float:
            missing = request.prompt_tokens - worker.held_tokens + worker.queued_tokens
            active = (1 - worker.free_share) * self._worker_pages
            active += request.prompt_tokens / request.page_tokens
            return self._overlap_weight * missing / request.page_tokens + active

        return Choice(min(workers, key=lambda one: (cost(one), _tie(request, one))).place)


def _fewest(request: RequestView, workers: Sequence[WorkerView]) -> WorkerView:
    return min(workers, key=lambda one: (one.in_flight, _tie(request, one)))


def _emptiest(request: RequestView, workers: Sequence[WorkerView]) -> WorkerView:
    """Return the worker with the least in its cache, which is the one with the most free memory."""
    return min(workers, key=lambda one: (-one.free_share, by_load(request, one)))


def _tie(request: RequestView, worker: WorkerView) -> bytes:
    return lot(request.request_id, worker.place)

"""What a simulation shows, in numbers.

Covers the record, which is the same for the same trace, policies and seed, but for `late_answers`. Does not cover how it is
shown (`pie.simulator.plots`).
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from pie.simulator.cluster import SimulatedCluster
from pie.simulator.outcome import Outcome
from pie.simulator.worker import SimulatedWorker

_BINS = 60
_GB = 1e9
_SOURCES = ("device", "host", "disk", "pool")


class Times(msgspec.Struct, frozen=True):
    """Seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker."""

    place: str
    requests: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that it computed."""
    busy_s: float
    evicted_pages: int


class Moment(msgspec.Struct, frozen=True):
    """The requests that arrived in one part of the time."""

    from_s: float
    requests: int
    hit_rate: float
    ttft_s: float
    """Mean; 0 where there was none."""


class Hint(msgspec.Struct, frozen=True):
    """How many workers a policy said that there should be; nobody starts or stops any."""

    at_s: float
    policy: str
    workers: int


class OrderReport(msgspec.Struct, frozen=True):
    """What came of what cluster policies ordered."""

    by_policy: dict[str, dict[str, int]]
    """Events by policy and action, as a live cluster logs them: `raise`, `lower`, `store`, `fetch`, `let-go`,
    `move`, `hint`, `lapse`, `done`, `refuse` and `fail`."""
    refusals: dict[str, int]
    """By policy and reason; one that stays the same is told once a minute."""
    bytes_moved: dict[str, int]
    """`stored` in the pool and `fetched` from it by workers, and `copied` from one pool node to another."""
    hints: list[Hint]


class LateAnswers(msgspec.Struct, frozen=True):
    """How long a policy of the user's own took, in real time."""

    answers: int
    late: int
    """Those that took longer than `deadline_ms`."""
    deadline_ms: float
    """What an answer may take while serving."""
    instead: str
    """What is done there instead."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One set of policies on one trace."""

    name: str
    policies: dict[str, str]
    """What they are, by kind, as `pie policy show` tells them."""
    requests: int
    refused: int
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    """Share of prompt tokens that were not computed."""
    hit_rate_by_source: dict[str, float]
    predicted_hit_rate: float
    """What the router expected."""
    ttft_s: Times
    """Time to first token."""
    busiest_over_mean: dict[str, float]
    """The busiest worker's share over the mean, by `computed_tokens`, `requests` and `busy_s`."""
    simulated_s: float
    evicted_pages: dict[str, int]
    bytes_moved: dict[str, int]
    """`host-loaded` and `pool-loaded` for requests, `pool-stored` by workers, as they make pages and by order."""
    orders: OrderReport
    policy_failures: dict[str, int]
    """How often each of the user's own policies failed; what is built in decided then."""
    late_answers: dict[str, LateAnswers]
    """By policy of the user's own; in real time, and so the one figure that another run may give otherwise."""
    not_simulated: list[str]
    """What the policies say and nobody does here."""
    warnings: list[str]
    """Selectors of the policies that nothing in the trace is like."""
    pages_lost: int
    """Pages that only a worker had that left."""
    storage_gb_hours: dict[str, float]
    """What was kept how long, by tier: times what a GB costs an hour, the cost of storage."""
    workers: list[WorkerReport]
    ttft_quantiles_s: list[float]
    """From the least to the most, in hundredths."""
    moments: list[Moment]


def report_of(
    name: str,
    cluster: SimulatedCluster,
    *,
    policies: Mapping[str, str] | None = None,
    warnings: Sequence[str] = (),
) -> Report:
    """Return the report of a cluster that a trace has run through, by these policies and with these warnings."""
    total, moments = _Tally(), _Moments(cluster.outcomes)
    by_place: dict[str, _Tally] = {}
    for one in cluster.outcomes:
        if not one.refused:
            for tally in (total, moments.of(one), by_place.setdefault(one.place, _Tally())):
                tally.add(one)
    prompt, cached = total.prompt_tokens, total.cached
    ttft_s = sorted(total.waits_s)
    workers = [_worker_report(one, by_place) for one in cluster.workers]
    page_bytes = cluster.spec.cost.bytes_of(cluster.spec.engine.page_tokens)
    loaded: Counter[str] = Counter()
    for worker in cluster.workers:
        loaded.update({tier.value: pages for tier, pages in worker.loads.pages.items()})
    evicted = {"device": sum(worker.evicted_pages for worker in workers)}
    moved = {f"{tier}-loaded": pages * page_bytes for tier, pages in sorted(loaded.items())}
    if cluster.pool is not None:
        evicted["pool"] = cluster.pool.evicted
        moved["pool-stored"] = cluster.pool.stored * page_bytes
    if cluster.spec.host_pages:
        evicted["host"] = sum(one.host.evicted for one in cluster.workers if one.host is not None)
    kept = cluster.page_seconds()
    return Report(
        name=name,
        policies=dict(policies or {}),
        requests=total.requests,
        refused=len(cluster.outcomes) - total.requests,
        prompt_tokens=prompt,
        output_tokens=total.output_tokens,
        hit_rate=_share(cached.total(), prompt),
        hit_rate_by_source={
            tier: _share(cached[tier], prompt) for tier in _SOURCES if cached[tier]
        },
        predicted_hit_rate=_share(total.predicted_tokens, prompt),
        ttft_s=times(ttft_s),
        busiest_over_mean={
            "computed_tokens": _busiest([one.computed_tokens for one in workers]),
            "requests": _busiest([one.requests for one in workers]),
            "busy_s": _busiest([one.busy_s for one in workers]),
        },
        simulated_s=cluster.clock.now_s(),
        evicted_pages=evicted,
        bytes_moved=moved,
        orders=_order_report(cluster, page_bytes),
        policy_failures=dict(sorted(cluster.policy_failures.items())),
        late_answers={
            name: LateAnswers(one.answers, one.late, one.deadline_s * 1e3, one.instead)
            for name, one in sorted(cluster.answer_times.items())
        },
        not_simulated=cluster.not_simulated,
        warnings=list(warnings),
        pages_lost=cluster.lost,
        storage_gb_hours={
            tier.name.lower(): round(seconds / 3600 * page_bytes / _GB, 6)
            for tier, seconds in sorted(kept.items())
        },
        workers=workers,
        ttft_quantiles_s=[quantile(ttft_s, at / 100) for at in range(101)],
        moments=moments.all(),
    )


def _order_report(cluster: SimulatedCluster, page_bytes: int) -> OrderReport:
    conductor = cluster.conductor
    by_policy: dict[str, dict[str, int]] = {}
    for (policy, action), count in sorted(conductor.counts.items()):
        by_policy.setdefault(policy, {})[action] = count
    moved = {kind: pages * page_bytes for kind, pages in sorted(conductor.moved.items())}
    if cluster.pool is not None and cluster.pool.copied:
        moved["copied"] = cluster.pool.copied * page_bytes
    refusals = sorted(conductor.refusals.items())
    return OrderReport(
        by_policy,
        {f"{policy}: {why}": count for (policy, why), count in refusals},
        moved,
        [Hint(*one) for one in conductor.hints],
    )


def times(sorted_s: Sequence[float]) -> Times:
    """Return mean and percentiles of seconds in order."""
    mean = statistics.fmean(sorted_s) if sorted_s else 0.0
    return Times(mean, *(quantile(sorted_s, at) for at in (0.5, 0.9, 0.99)))


def quantile(values: Sequence[float], at: float) -> float:
    """Return a quantile of values in order, between neighbours where it lies there; 0 of none."""
    if not values:
        return 0.0
    place = at * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def _worker_report(worker: SimulatedWorker, by_place: Mapping[str, _Tally]) -> WorkerReport:
    own = by_place.get(worker.books.record.place, _Tally())
    return WorkerReport(
        place=worker.books.record.place,
        requests=own.requests,
        prompt_tokens=own.prompt_tokens,
        computed_tokens=own.prompt_tokens - own.cached.total(),
        busy_s=worker.engine.counts.busy_s,
        evicted_pages=worker.engine.table.evicted,
    )


class _Tally:
    """What some requests had together."""

    def __init__(self) -> None:
        self.requests = self.prompt_tokens = self.predicted_tokens = self.output_tokens = 0
        self.cached = Counter[str]()
        self.waits_s = array("d")
        """For first tokens."""

    def add(self, one: Outcome) -> None:
        """Count one more."""
        self.requests += 1
        self.prompt_tokens += one.prompt_tokens
        self.predicted_tokens += one.predicted_tokens
        self.output_tokens += one.output_tokens
        for tier, tokens in one.cached.items():
            self.cached[tier] += tokens
        if (wait_s := one.ttft_s) is not None:
            self.waits_s.append(wait_s)


class _Moments:
    """Equal parts of the time in which requests arrived that were answered."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._first_s, self._last_s = math.inf, -math.inf
        for one in outcomes:
            if not one.refused:
                self._first_s = min(self._first_s, one.arrived_s)
                self._last_s = max(self._last_s, one.arrived_s)
        self._parts = [_Tally() for _ in range(_BINS)]

    def of(self, one: Outcome) -> _Tally:
        """Return the part that a request arrived in."""
        span_s = self._last_s - self._first_s
        at = int((one.arrived_s - self._first_s) / span_s * _BINS) if span_s else 0
        return self._parts[min(at, _BINS - 1)]

    def all(self) -> list[Moment]:
        """Return them; none where nothing was answered."""
        if self._last_s < self._first_s:
            return []
        span_s = self._last_s - self._first_s
        return [
            Moment(
                from_s=self._first_s + at * span_s / _BINS,
                requests=part.requests,
                hit_rate=_share(part.cached.total(), part.prompt_tokens),
                ttft_s=statistics.fmean(part.waits_s) if part.waits_s else 0.0,
            )
            for at, part in enumerate(self._parts)
        ]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _busiest(loads: Sequence[float]) -> float:
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0

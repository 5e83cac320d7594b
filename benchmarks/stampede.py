"""A stampede in simulation: a prefix that nobody had asks for 60 % of eight workers, all at once.

**What it stands for.** A service is running well below what its workers can do. At one moment a document of 8,192
tokens (a page that is in the news, a new system prompt) is what 60 % of all requests ask about, each with a question
of its own of 256 tokens. The other 40 % go on as before: prompts of 2,048 tokens that share nothing. Answers have 20
to 200 tokens. Arrivals are Poisson.

**Why these parameters.** The prefix is cold at first, because that is what makes a stampede: a prefix that has been
hot for long is everywhere already. The quiet time before it fills what routers know of speeds. The load after it
is `LOAD` of what the workers could do if every prefix were in every device memory and requests spread
perfectly (`requests_per_s`): a cluster that can carry the stampede, so that what is measured is how well it is spread.
45 seconds of it are long enough for a hundredth of the requests to be more than the first moment, in which
nobody can have the prefix. Load, sizes and times were
chosen before any policy had run on them; the slow pool was added after the fast one had shown no difference.

A hundredth of one run's requests is some 38 of them, and a seed's 99th percentile depends on a few: compared is that
of the requests of all seeds together, and each seed's is reported beside it.

**The overloaded one** has no quiet time and arrives at 104 % of what the workers can do: there all policies have
a queue that grows until the end, and times to first token tell its length and not who spreads better.

**What bounds it.** A prompt of 2,048 new tokens takes 0.14 s to compute alone, and two of five requests have one, so
no policy has a 99th percentile below that. With a fast pool every policy comes near it, `prefix-affinity` too: the
prefix is everywhere within a second, and half of what it needs cannot be reached.

Three clusters, each the same for all policies: workers alone; with host memory and a pool of one node on 25 Gbit/s; and
with host memory and a pool of four nodes on 100 Gbit/s, as fast as the cost model has it. Copies need a pool: without
one `replicate-hot` can order nothing, and what is measured is the routing that it comes with by default, `cost`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

import msgspec

from pie.policies.loader import load_policies
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.engine import EngineSpec
from pie.simulator.report import quantile, report_of
from pie.simulator.trace import TraceRequest
from pie.worker.load_choice import LoadTier

WORKERS = 8
PREFIX_TOKENS = 8_192
QUESTION_TOKENS = 256
OTHER_TOKENS = 2_048
OUTPUT_TOKENS = (20, 200)
HOT_SHARE = 0.6
LOAD = 0.7
QUIET_S = 15.0
STAMPEDE_S = 45.0
SEEDS = (1, 2, 3)
OVERLOADED_PER_S = 110.0
OVERLOADED_REQUESTS = 6_000

_ENGINE = EngineSpec(pages=8_192, page_tokens=64)
ALONE = ClusterSpec(workers=WORKERS, engine=_ENGINE)
FAST_POOL = replace(ALONE, host_pages=8_192, pool_pages=65_536, pool_nodes=4)
SLOW_TOKENS_PER_S = 25e9 / 8 / 131_072
"""What 25 Gbit/s bring, at the 128 KiB that a token of the cost model has."""
SLOW_POOL = replace(
    FAST_POOL,
    pool_nodes=1,
    cost=msgspec.structs.replace(
        ALONE.cost,
        load_tokens_per_s={**ALONE.cost.load_tokens_per_s, LoadTier.POOL: SLOW_TOKENS_PER_S},
        node_tokens_per_s=SLOW_TOKENS_PER_S,
    ),
)
_HOT = f"{{policy: replicate-hot, workers: {WORKERS}, worker_uses: 5}}"
BASELINE = "prefix-affinity"
MEASURED = "replicate-hot"
POLICIES: Mapping[str, str] = {
    BASELINE: "{routing: prefix-affinity}",
    MEASURED: f"{{replication: {_HOT}}}",
    "cost": "{routing: cost}",
    "replicate-hot, routing prefix-affinity": f"{{routing: prefix-affinity, replication: {_HOT}}}",
}
_CLUSTERS: Mapping[str, ClusterSpec] = {
    "alone": ALONE,
    "slow_pool": SLOW_POOL,
    "fast_pool": FAST_POOL,
}
MUST_STAY_BELOW = {
    f"stampede_{cluster}_{figure}": most
    for cluster in _CLUSTERS
    for figure, most in (
        ("p99_over_prefix_affinity", 0.5),
        ("busiest_over_mean", 1.25),
        ("hit_rate_lost", 0.03),
    )
}


def requests_per_s() -> float:
    """Return what `LOAD` comes to: prefill and what decode adds to steps, every prefix held everywhere."""
    cost = ALONE.cost
    prompt = HOT_SHARE * QUESTION_TOKENS + (1 - HOT_SHARE) * OTHER_TOKENS
    answer = sum(OUTPUT_TOKENS) / 2
    work_s = prompt / cost.prefill_tokens_per_s + answer * cost.decode_sequence_ms / 1e3
    return LOAD * WORKERS / work_s


def stampede(seed: int) -> list[TraceRequest]:
    """Return the trace: the others alone, and then with the prefix."""
    random, now_s, per_s = Random(seed), 0.0, requests_per_s()
    trace: list[TraceRequest] = []
    while True:
        quiet = now_s < QUIET_S
        now_s += random.expovariate(per_s * (1 - HOT_SHARE) if quiet else per_s)
        if now_s >= QUIET_S + STAMPEDE_S:
            return trace
        trace.append(_request(random, now_s, len(trace), may_be_hot=now_s >= QUIET_S))


def overloaded(seed: int = 1) -> list[TraceRequest]:
    """Return a trace that arrives faster than the workers can answer it."""
    random, now_s = Random(seed), 0.0
    trace: list[TraceRequest] = []
    for number in range(OVERLOADED_REQUESTS):
        now_s += random.expovariate(OVERLOADED_PER_S)
        trace.append(_request(random, now_s, number, may_be_hot=True))
    return trace


def _request(random: Random, now_s: float, number: int, *, may_be_hot: bool) -> TraceRequest:
    hot = may_be_hot and random.random() < HOT_SHARE
    own = 10 + number
    runs = ((1, PREFIX_TOKENS), (own, QUESTION_TOKENS)) if hot else ((own, OTHER_TOKENS),)
    return TraceRequest(now_s, runs, random.randint(*OUTPUT_TOKENS), answer=10_000_000 + number)


def run() -> dict[str, object]:
    """Return the figures of each cluster and policy, and what `replicate-hot` comes to beside the baseline."""
    figures: dict[str, object] = {"stampede_requests_per_s": round(requests_per_s(), 1)}
    for name, spec in _CLUSTERS.items():
        by_seed: dict[str, dict[str, dict[str, object]]] = {}
        waits: dict[str, list[float]] = {}
        # Where nothing is near its bound, one run tells it.
        for seed in SEEDS[:1] if spec is FAST_POOL else SEEDS:
            # What each does in one run is enough of those that are not compared.
            names = POLICIES if seed == SEEDS[0] and spec is not ALONE else (BASELINE, MEASURED)
            by_seed[str(seed)] = {}
            for one in names:
                by_seed[str(seed)][one], ttft_s = _measured(spec, one, stampede(seed))
                waits.setdefault(one, []).extend(ttft_s)
        figures[f"stampede_{name}"] = by_seed
        p99_s = {one: quantile(sorted(all_s), 0.99) for one, all_s in waits.items()}
        compared = [beside_baseline(one) for one in by_seed.values()]
        beside: dict[str, object] = {
            "p99_over_prefix_affinity": round(p99_s[MEASURED] / p99_s[BASELINE], 3),
            "p99_over_prefix_affinity_by_seed": [
                one["p99_over_prefix_affinity"] for one in compared
            ],
            "busiest_over_mean": max(one["busiest_over_mean"] for one in compared),
            "hit_rate_lost": max(one["hit_rate_lost"] for one in compared),
        }
        figures.update((f"stampede_{name}_{figure}", value) for figure, value in beside.items())
        print(name, beside, flush=True)
    figures["stampede_overloaded"] = {
        name: _measured(ALONE, name, overloaded())[0] for name in (BASELINE, MEASURED)
    }
    return figures


def beside_baseline(figures: Mapping[str, Mapping[str, object]]) -> dict[str, float]:
    """Return `replicate-hot`'s p99 over the baseline's, its balance, and what it lost in hit rate."""
    mine, other = figures[MEASURED], figures[BASELINE]
    return {
        "p99_over_prefix_affinity": round(
            _number(mine, "ttft_p99_s") / _number(other, "ttft_p99_s"), 3
        ),
        "busiest_over_mean": max(
            _number(mine, "busiest_over_mean_tokens"), _number(mine, "busiest_over_mean_time")
        ),
        "hit_rate_lost": round(_number(other, "hit_rate") - _number(mine, "hit_rate"), 4),
    }


def _measured(
    spec: ClusterSpec, name: str, trace: Sequence[TraceRequest]
) -> tuple[dict[str, object], list[float]]:
    """Return the figures, and every request's time to first token."""
    cluster = SimulatedCluster(spec, load_policies(f"cluster: {POLICIES[name]}", name=name))
    cluster.run_open(trace)
    report = report_of(name, cluster)
    hot_s = sorted(
        outcome.ttft_s
        for outcome, request in zip(cluster.outcomes, trace, strict=True)
        if outcome.ttft_s is not None and len(request.runs) > 1
    )
    figures: dict[str, object] = {
        "requests": report.requests,
        "hit_rate": round(report.hit_rate, 4),
        "ttft_mean_s": round(report.ttft_s.mean, 3),
        "ttft_p50_s": round(report.ttft_s.p50, 3),
        "ttft_p99_s": round(report.ttft_s.p99, 3),
        "ttft_p99_of_the_hot_prefix_s": round(quantile(hot_s, 0.99), 3),
        "busiest_over_mean_tokens": round(report.busiest_over_mean["computed_tokens"], 3),
        "busiest_over_mean_time": round(report.busiest_over_mean["busy_s"], 3),
        "busiest_over_mean_requests": round(report.busiest_over_mean["requests"], 3),
        "orders": report.orders.by_policy,
        "refusals": report.orders.refusals,
        "bytes_moved_by_orders": report.orders.bytes_moved,
        "bytes_moved": report.bytes_moved,
    }
    print(name, figures, flush=True)
    return figures, [one.ttft_s for one in cluster.outcomes if one.ttft_s is not None]


def _number(figures: Mapping[str, object], name: str) -> float:
    value = figures[name]
    assert isinstance(value, int | float)
    return float(value)

"""Routing on a real trace, in simulation: hit rates and times to first token, beside other routers' rules.

The trace is Mooncake's conversation trace (FAST '25), as the file that `PIE_TRACE` names; without it nothing is
simulated, and the results say so. The stampede is in `benchmarks/stampede.py`. Every request of that trace begins with the same page, which
is what breaks rules that follow any match.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.live_mock import live_rates, simulated_rates
from pie.policies.loader import load_policies
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.cost_model import CostModel
from pie.simulator.peers import NAMES
from pie.simulator.report import Report, report_of
from pie.simulator.trace import TraceRequest, read_trace
from pie.simulator.worker import PoolStores

CLIENTS = 8
LIVE_SPEED = 40.0
FOUR = ClusterSpec(workers=4, cost=CostModel(prefill_tokens_per_s=15_000.0))
EIGHT = ClusterSpec(workers=8, cost=CostModel(prefill_tokens_per_s=8_000.0))
POOLED = {
    stores: ClusterSpec(workers=4, cost=FOUR.cost, pool_pages=16_384, pool_stores=stores)
    for stores in PoolStores
}


def run() -> dict[str, object]:
    """Return the figures of each cluster and policy."""
    results: dict[str, object] = {}
    file = os.environ.get("PIE_TRACE", "")
    if not file or not Path(file).is_file():
        results["skipped"] = f"PIE_TRACE names no trace ({file or 'not set'})"
        print(results["skipped"])
        return results
    trace = read_trace(Path(file)).requests
    results["requests"] = len(trace)
    results["closed_loop_of_8"] = {
        "cost": _closed(FOUR, "cost", trace),
        "round-robin": _closed(FOUR, "round-robin", trace),
        "cost, pool of computed pages": _closed(POOLED[PoolStores.BEHIND], "cost", trace),
        "cost, pool of pages that left": _closed(POOLED[PoolStores.SPILL], "cost", trace),
    }
    results["live_mock_cluster_closed_loop_of_8"] = _live(trace)
    first, again = (_open(FOUR, "cost", trace) for _ in range(2))
    results["the_same_twice"] = _figures(first[0]) == _figures(again[0])
    results["requests_a_minute"] = round(60 * len(trace) / min(first[1], again[1]))
    results["open_loop_4_workers_15000_tokens_per_s"] = {
        "cost": _figures(first[0]),
        **{peer: _figures(_open(FOUR, _peer(peer), trace)[0]) for peer in NAMES},
    }
    results["open_loop_8_workers_8000_tokens_per_s"] = {
        "cost": _figures(_open(EIGHT, "cost", trace)[0])
    }
    return results


def _live(trace: Sequence[TraceRequest]) -> dict[str, object]:
    """Return what mock workers behind a real router and index find, beside what the simulator says."""
    policies = "cluster: {routing: cost}"
    simulated = simulated_rates(FOUR, policies, trace, clients=CLIENTS)
    live = live_rates(FOUR, policies, trace, clients=CLIENTS, speed=LIVE_SPEED)
    figures: dict[str, object] = {
        "live_hit_rate": round(live.hit_rate, 4),
        "simulated_hit_rate": round(simulated.hit_rate, 4),
        "differ_by": round(abs(live.hit_rate - simulated.hit_rate), 4),
        "must_differ_by_at_most": 0.01,
        "live_busiest_over_mean": round(live.busiest_over_mean, 3),
        "simulated_busiest_over_mean": round(simulated.busiest_over_mean, 3),
    }
    print("live", figures)
    return figures


def _open(spec: ClusterSpec, routing: str, trace: Sequence[TraceRequest]) -> tuple[Report, float]:
    """Return the report, and the processor's seconds that it took."""
    began_s = time.process_time()
    cluster = SimulatedCluster(
        spec, load_policies(f"cluster: {{routing: {routing}}}", name=routing)
    )
    cluster.run_open(trace)
    return report_of(routing, cluster), time.process_time() - began_s


def _closed(spec: ClusterSpec, routing: str, trace: Sequence[TraceRequest]) -> dict[str, object]:
    cluster = SimulatedCluster(
        spec, load_policies(f"cluster: {{routing: {routing}}}", name=routing)
    )
    cluster.run_closed(trace, clients=CLIENTS)
    return _figures(report_of(routing, cluster))


def _peer(name: str) -> str:
    return f"'pie.simulator.peers:{name}'"


def _figures(report: Report) -> dict[str, object]:
    figures: dict[str, object] = {
        "hit_rate": round(report.hit_rate, 4),
        "hit_rate_by_source": {k: round(v, 4) for k, v in report.hit_rate_by_source.items()},
        "predicted_hit_rate": round(report.predicted_hit_rate, 4),
        "ttft_mean_s": round(report.ttft_s.mean, 3),
        "ttft_p50_s": round(report.ttft_s.p50, 3),
        "ttft_p99_s": round(report.ttft_s.p99, 3),
        "busiest_over_mean": {k: round(v, 3) for k, v in report.busiest_over_mean.items()},
    }
    print(report.name, figures)
    return figures

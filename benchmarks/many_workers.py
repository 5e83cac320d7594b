"""A thousand workers in simulation: what a request costs there, in processor time.

Covers a made-up trace that keeps them half busy: prompts of 2,048 tokens whose first page is everybody's, a quarter of
them the next turn of a conversation. Does not cover real traces (`benchmarks/bench_routing.py`).
"""

from __future__ import annotations

import random
import time

from pie.policies.loader import load_policies
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.engine import EngineSpec
from pie.simulator.report import report_of
from pie.simulator.trace import TraceRequest

WORKERS = 1_000
REQUESTS = 10_000
RATE = 2_000.0
"""Requests a second."""
_COMMON, _ANSWER = 1, 2
_PAGE = 512


def trace(requests: int = REQUESTS, *, rate: float = RATE, seed: int = 1) -> list[TraceRequest]:
    """Return made-up requests."""
    draw = random.Random(seed)
    made: list[TraceRequest] = []
    at_s = 0.0
    turns: dict[int, int] = {}
    for number in range(requests):
        at_s += draw.expovariate(rate)
        talk = number
        if turns and draw.random() < 0.25:
            talk = draw.choice(range(max(0, number - 2_000), number))
        turn = turns[talk] = turns.get(talk, 2) + 1
        made.append(
            TraceRequest(
                arrival_s=at_s,
                runs=((_COMMON, _PAGE), (10 + talk, turn * _PAGE)),
                output_tokens=draw.randint(20, 100),
                answer=_ANSWER,
            )
        )
    return made


def run() -> dict[str, object]:
    """Return the figures."""
    requests = trace()
    spec = ClusterSpec(workers=WORKERS, engine=EngineSpec(pages=512))
    cluster = SimulatedCluster(spec, load_policies("cluster: {routing: cost}", name="cost"))
    began_s = time.process_time()
    cluster.run_open(requests)
    report = report_of("cost", cluster)
    spent_s = time.process_time() - began_s
    figures: dict[str, object] = {
        "many_workers": WORKERS,
        "many_workers_request_cpu_ms": round(spent_s / len(requests) * 1e3, 3),
        "many_workers_requests_a_cpu_minute": round(60 * len(requests) / spent_s),
        "many_workers_hit_rate": round(report.hit_rate, 4),
        "many_workers_ttft_mean_s": round(report.ttft_s.mean, 4),
    }
    print(figures, flush=True)
    return figures


if __name__ == "__main__":
    run()

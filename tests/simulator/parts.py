"""Small clusters and traces."""

from __future__ import annotations

from pie.policies.loader import load_policies
from pie.simulator.cluster import ClusterSpec, SimulatedCluster
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import EngineSpec
from pie.simulator.trace import TraceRequest

PAGE = 4


def spec(
    *, workers: int = 2, pages: int = 64, pool_pages: int = 0, **engine: object
) -> ClusterSpec:
    fields = {"pages": pages, "page_tokens": PAGE, "max_running": 8, "step_tokens": 64}
    return ClusterSpec(
        workers=workers,
        engine=EngineSpec(**(fields | engine)),  # type: ignore[arg-type]
        cost=CostModel(prefill_tokens_per_s=1_000.0, decode_step_ms=10.0, decode_sequence_ms=1.0),
        pool_pages=pool_pages,
    )


def cluster(
    of: ClusterSpec | None = None, policies: str = "cluster: {routing: cost}"
) -> SimulatedCluster:
    return SimulatedCluster(of or spec(), load_policies(policies, name="test"))


def ask(
    arrival_s: float, *runs: tuple[int, int], output: int = 4, session: str | None = None
) -> TraceRequest:
    return TraceRequest(
        arrival_s=arrival_s,
        runs=runs,
        output_tokens=output,
        answer=1_000 + runs[-1][0],
        session=session,
    )

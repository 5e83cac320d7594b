"""What retention policies make of traces, what choosing a victim costs, who spreads a stampede, and what a choice among many costs.

Retention: one cache of pages and one prompt after another; hit rates count prompt tokens. The conversation
trace is Mooncake's (FAST '25), as the file that `PIE_TRACE` names; without it that part is left
out. The made-up traces are in `benchmarks/workloads.py`. The stampede is a whole cluster in simulation:
`benchmarks/stampede.py` says what it stands for; a thousand workers are in `benchmarks/many_workers.py`.
"""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from benchmarks import many_workers, stampede
from benchmarks.one_cache import Prompt, foresight, read_trace, replay
from benchmarks.workloads import WORKLOADS
from pie.page.events import Part, Tier
from pie.page.key import PageKey
from pie.policies.manager import RetentionManager
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.retention import PageView, RetentionPolicy

TRACE_PAGES = (4_096, 16_384)
WORKLOAD_PAGES = 1_024
WORKLOAD_PROMPTS = 2_500
TABLE_PAGES = 1_000_000
CHOSEN = 100_000
AT_ONCE = 16
MUST_REACH = {
    "conversation_4096_adaptive_hit_rate": 0.13,
    "conversation_16384_adaptive_hit_rate": 0.275,
}
MUST_STAY_BELOW = {
    "adaptive_worst_loss_to_lru": 0.005,
    "lru_victim_cpu_us": 5.0,
    **stampede.MUST_STAY_BELOW,
}

_RETENTION = BUILTIN[PolicyKind.RETENTION]


def run() -> dict[str, object]:
    """Measure, and return hit rates and times."""
    rates, losses = _workloads()
    figures: dict[str, object] = {
        "workload_pages": WORKLOAD_PAGES,
        "workload_hit_rates": rates,
        "adaptive_loss_to_lru": losses,
        "adaptive_worst_loss_to_lru": max(losses.values()),
    }
    for name in ("lru", "adaptive"):
        figures.update(_victims(name))
    figures.update(stampede.run())
    figures.update(many_workers.run())
    trace = os.environ.get("PIE_TRACE")
    if not trace:
        figures["conversation_skipped"] = "PIE_TRACE names no file"
    else:
        figures.update(_conversation(list(read_trace(Path(trace)))))
    return {**figures, "must_reach": MUST_REACH, "must_stay_below": MUST_STAY_BELOW}


def _new(name: str) -> RetentionPolicy:
    policy: RetentionPolicy = _RETENTION[name]()  # type: ignore[assignment]
    return policy


def _conversation(prompts: list[Prompt]) -> dict[str, object]:
    figures: dict[str, object] = {}
    for pages in TRACE_PAGES:
        best = foresight(prompts, pages=pages)
        figures[f"conversation_{pages}_foresight_hit_rate"] = round(best.hit_rate, 4)
        for name in _RETENTION:
            outcome = replay(_new(name), prompts, pages=pages)
            figures[f"conversation_{pages}_{name}_hit_rate"] = round(outcome.hit_rate, 4)
            print(pages, name, round(outcome.hit_rate, 4), flush=True)
    return figures


def _workloads() -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    rates: dict[str, dict[str, float]] = {}
    for workload, make in WORKLOADS.items():
        prompts = make(WORKLOAD_PROMPTS)
        rates[workload] = {
            name: round(replay(_new(name), prompts, pages=WORKLOAD_PAGES).hit_rate, 4)
            for name in _RETENTION
        }
        print(workload, rates[workload], flush=True)
    losses = {name: round(one["lru"] - one["adaptive"], 4) for name, one in rates.items()}
    return rates, losses


def _victims(name: str) -> dict[str, object]:
    """Time choosing victims of a full tier, a few at a time, in CPU time; each is then replaced."""
    manager = RetentionManager(_new(name), name="bench")
    gc.collect()
    for number in range(TABLE_PAGES):
        manager.stored(_view(number), 0.0)
    gc.collect()
    longest_s = seconds = 0.0
    number = TABLE_PAGES
    for _ in range(CHOSEN // AT_ONCE):
        started_s = time.thread_time()
        victims = manager.victims(AT_ONCE, 0.0)
        took_s = time.thread_time() - started_s
        seconds += took_s
        longest_s = max(longest_s, took_s)
        for key, part in victims:
            manager.removed(key, part)
        for _ in victims:
            manager.stored(_view(number), 0.0)
            number += 1
    return {
        f"{name}_victim_cpu_us": round(seconds / CHOSEN * 1e6, 2),
        f"{name}_longest_choice_cpu_ms": round(longest_s * 1e3, 2),
    }


def _view(number: int) -> PageView:
    """Return a page of a sequence of 32."""
    before = b"root" if number % 32 == 0 else _page_key(number - 1)
    return PageView(_page_key(number), before, number % 32, Part.FULL, Tier.POOL_RAM, 1)


def _page_key(number: int) -> PageKey:
    return PageKey((number * 0x9E3779B97F4A7C15 & (1 << 64) - 1).to_bytes(32, "big"))

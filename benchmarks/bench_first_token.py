"""Time to first token through a whole cluster, and the memory that it takes.

A cluster of two workers answers prompts of 2,048 + 16 tokens: cold, with the prefix held by the
worker, and with the prefix in the pool only. The baseline is transformers' cold prefill of the same
prompts with the same threads, in the same run, while the cluster idles.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import psutil
import torch

from benchmarks.reference import Reference
from pie.cluster.config import load_config
from pie.cluster.guard import MARK_VARIABLE, marked_processes
from pie.cluster.launch import Addresses, running
from pie.worker.sources import resolve

PREFIX_TOKENS = 2048
TAIL_TOKENS = 16
RUNS = 5
_POOL_SETTLES_S = 3.0


def run() -> dict[str, object]:
    """Measure, and return figures in milliseconds and MiB."""
    with tempfile.TemporaryDirectory(prefix="pie-bench-") as folder:
        environment = {
            "PIE_ROUTER__PORT": "0",
            "PIE_INDEX__DATA_DIR": f"{folder}/index",
        }
        loaded = load_config(None, {**os.environ, **environment})
        config = loaded.config
        threads = max(1, (psutil.cpu_count() or 1) // config.cluster.workers)
        model = resolve(config.model.source, cache_folder=config.model.cache_folder.expanduser())
        with running(config, lambda _part, _what: None) as (_cluster, addresses):
            figures = _measure(addresses, model.path, threads)
    return {"threads_per_worker": threads, "prefix_tokens": PREFIX_TOKENS, **figures}


def _measure(addresses: Addresses, model: Path, threads: int) -> dict[str, object]:
    first, second = sorted(addresses.workers)
    draw = random.Random(0)
    prefixes = [tokens(draw, PREFIX_TOKENS) for _ in range(RUNS)]
    with httpx.Client(base_url=addresses.router, timeout=120) as client:
        name = client.get("/v1/models").json()["data"][0]["id"]

        def ask(prompt: Sequence[int], place: str) -> tuple[float, int]:
            elapsed_ms, headers = first_token(client, name, prompt, place)
            return elapsed_ms, int(headers["x-pie-cached-tokens"])

        for place in (first, second):
            ask(tokens(draw, 256), place)
        cold = _series(ask, prefixes, draw, first, cached=range(1))
        warm = _series(ask, prefixes, draw, first, cached=range(PREFIX_TOKENS, PREFIX_TOKENS + 1))
        time.sleep(_POOL_SETTLES_S)
        pool = _series(ask, prefixes, draw, second, cached=range(PREFIX_TOKENS, PREFIX_TOKENS + 1))
    memory = _resident_mib()
    reference = Reference(model, torch.bfloat16, threads)
    reference.prefill_s(prefixes[0][:256])
    baseline = [
        reference.prefill_s([*prefix, *tokens(draw, TAIL_TOKENS)]) * 1000 for prefix in prefixes
    ]
    median = statistics.median(baseline)
    return {
        "transformers_cold_prefill_ms": spread(baseline),
        "cold_ms": spread(cold),
        "warm_ms": spread(warm),
        "pool_ms": spread(pool),
        "warm_over_transformers_cold": round(statistics.median(warm) / median, 4),
        "pool_over_transformers_cold": round(statistics.median(pool) / median, 4),
        "must_reach": {"warm_over_transformers_cold": 0.06, "pool_over_transformers_cold": 0.25},
        "resident_mib": memory,
    }


def _series(
    ask: Callable[[Sequence[int], str], tuple[float, int]],
    prefixes: Sequence[Sequence[int]],
    draw: random.Random,
    place: str,
    *,
    cached: range,
) -> list[float]:
    times = []
    for prefix in prefixes:
        elapsed_ms, hits = ask([*prefix, *tokens(draw, TAIL_TOKENS)], place)
        if hits not in cached:
            raise RuntimeError(f"{hits} cached tokens at {place}, not {cached}")
        times.append(elapsed_ms)
    return times


def first_token(
    client: httpx.Client, model: str, prompt: Sequence[int], place: str
) -> tuple[float, Mapping[str, str]]:
    """Return the milliseconds until a worker's first token, and the answer's headers."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    start_s = time.perf_counter()
    with client.stream(
        "POST", "/v1/completions", json=body, headers={"x-pie-place": place}
    ) as answer:
        answer.raise_for_status()
        lines = answer.iter_lines()
        next(line for line in lines if line.startswith("data:"))
        elapsed_ms = (time.perf_counter() - start_s) * 1000
        for _ in lines:
            pass
        return elapsed_ms, answer.headers


def tokens(draw: random.Random, count: int) -> list[int]:
    """Return random ordinary tokens."""
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def _resident_mib() -> dict[str, float]:
    """Return the resident memory of the cluster's processes, shared memory counted every time."""
    sizes: dict[str, float] = {}
    for process in [psutil.Process(), *marked_processes(os.environ[MARK_VARIABLE])]:
        name = process.cmdline()[0] if process.cmdline() else process.name()
        kind = name if name.startswith("ray::") else Path(name).name.split()[0]
        sizes[kind] = sizes.get(kind, 0.0) + process.memory_info().rss / 2**20
    sizes["total"] = sum(sizes.values())
    return {kind: round(size, 1) for kind, size in sorted(sizes.items())}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return what a figure says of several runs."""
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
    }

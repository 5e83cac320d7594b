"""Time to first token of a conversation that was idle and has left device memory.

Conversations of 2,048 tokens are asked at a worker whose device memory holds one of them, and each is
asked again, with 16 tokens more: from host memory, and from disk, after a restart and with nothing of
it left in the system's cache of files. The baseline is transformers' cold prefill of the same prompts
with the same threads, in the same run, while the cluster idles.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import torch

from benchmarks.bench_first_token import (
    PREFIX_TOKENS,
    RUNS,
    TAIL_TOKENS,
    first_token,
    spread,
    tokens,
)
from benchmarks.reference import Reference
from pie.cluster.config import load_config
from pie.cluster.launch import running
from pie.worker.sources import resolve

_PLACE = "worker-0"
_SETTINGS = {
    "PIE_ROUTER__PORT": "0",
    "PIE_POOL__NODES": "0",
    "PIE_MODEL__DEVICE_KV_BUDGET": "64MiB",
}


def run() -> dict[str, object]:
    """Measure, and return figures in milliseconds."""
    draw = random.Random(0)
    prefixes = [tokens(draw, PREFIX_TOKENS) for _ in range(RUNS)]
    with tempfile.TemporaryDirectory(prefix="pie-bench-") as name:
        folder = Path(name)
        with _asking(folder, {"PIE_MODEL__HOST_KV_BUDGET": "1GiB"}) as asking:
            cold = asking.series(prefixes, draw, "")
            host = asking.series(prefixes, draw, f"host={PREFIX_TOKENS}")
            baseline = _baseline(asking, prefixes, draw)
        on_disk = {
            "PIE_MODEL__HOST_KV_BUDGET": "0",
            "PIE_MODEL__DISK_KV_BUDGET": "2GiB",
            "PIE_MODEL__DISK_KV_PATH": f"{folder}/kv",
        }
        with _asking(folder, on_disk) as asking:
            asking.series(prefixes, draw, "")
        _forget(folder / "kv")
        with _asking(folder, on_disk) as asking:
            disk = asking.series(prefixes, draw, f"disk={PREFIX_TOKENS}")
    median = statistics.median(baseline)
    return {
        "threads_per_worker": asking.threads,
        "prefix_tokens": PREFIX_TOKENS,
        "transformers_cold_prefill_ms": spread(baseline),
        "cold_ms": spread(cold),
        "host_ms": spread(host),
        "disk_after_restart_ms": spread(disk),
        "host_over_transformers_cold": round(statistics.median(host) / median, 4),
        "disk_over_transformers_cold": round(statistics.median(disk) / median, 4),
        "must_reach": {"host_over_transformers_cold": 0.10, "disk_over_transformers_cold": 0.25},
    }


class _Asking:
    """One cluster, and its model."""

    def __init__(self, client: httpx.Client, model: Path, threads: int) -> None:
        self.model = model
        self.threads = threads
        self._client = client
        self._name = client.get("/v1/models").json()["data"][0]["id"]

    def series(
        self, prefixes: Sequence[Sequence[int]], draw: random.Random, source: str
    ) -> list[float]:
        """Ask each prefix with a new tail; its pages must come from `source`."""
        first_token(self._client, self._name, tokens(draw, 256), _PLACE)
        times = []
        for prefix in prefixes:
            prompt = [*prefix, *tokens(draw, TAIL_TOKENS)]
            elapsed_ms, headers = first_token(self._client, self._name, prompt, _PLACE)
            if headers["x-pie-cached-from"] != source:
                raise RuntimeError(f"pages came from {headers['x-pie-cached-from']!r}: {headers}")
            times.append(elapsed_ms)
        return times


@contextmanager
def _asking(folder: Path, settings: Mapping[str, str]) -> Iterator[_Asking]:
    """Start a cluster, and stop it at the end of the block."""
    index = {"PIE_INDEX__DATA_DIR": f"{folder}/index"}
    config = load_config(None, {**os.environ, **_SETTINGS, **index, **settings}).config
    threads = max(1, (psutil.cpu_count() or 1) // config.cluster.workers)
    model = resolve(config.model.source, cache_folder=config.model.cache_folder.expanduser())
    with (
        running(config, lambda _part, _what: None) as (_cluster, addresses),
        httpx.Client(base_url=addresses.router, timeout=120) as client,
    ):
        yield _Asking(client, model.path, threads)


def _baseline(
    asking: _Asking, prefixes: Sequence[Sequence[int]], draw: random.Random
) -> list[float]:
    reference = Reference(asking.model, torch.bfloat16, asking.threads)
    reference.prefill_s(prefixes[0][:256])
    return [
        reference.prefill_s([*prefix, *tokens(draw, TAIL_TOKENS)]) * 1000 for prefix in prefixes
    ]


def _forget(folder: Path) -> None:
    """Let the system's cache forget all files below a folder, so that they are read from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)

"""Compare Pie's worker engine with vLLM's CPU build, and write `benchmarks/results/peers.json`.

`python -m benchmarks.peers --venv FOLDER` installs vLLM there where it is not yet. Both engines get
SmolLM2 in bfloat16, the same threads and the same memory for KV, and take turns in every case, so
that whatever else the machine does falls on both; who is not measured is stopped.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.machine import describe, write_result
from benchmarks.peers.contest import CASES, Case
from benchmarks.peers.environment import python_of
from benchmarks.peers.process import Process
from pie.cluster.ray_environment import SPIN_COUNT
from pie.worker.settings import ModelSettings
from pie.worker.sources import resolve

MUST_REACH = 1.0
_ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run all cases, or those that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=str([one.name for one in CASES]))
    parser.add_argument("--venv", type=Path, required=True, help="where vLLM is or is to be")
    parser.add_argument("--runs", type=int, default=5, help="runs of each case (default: 5)")
    arguments = parser.parse_args()
    cases = [one for one in CASES if not arguments.cases or one.name in arguments.cases]
    machine = describe()
    theirs = python_of(arguments.venv.expanduser().absolute())
    settings = ModelSettings()
    folder = resolve(settings.source, cache_folder=settings.cache_folder.expanduser()).path
    threads = len(os.sched_getaffinity(0))
    with tempfile.NamedTemporaryFile(prefix="pie-peers-", suffix=".log", delete=False) as log:
        print(f"starting both; what they write goes to {log.name}", file=sys.stderr)
        pie = Process(_module(sys.executable, "pie", str(threads)), _pie_environment(), log)
        try:
            vllm = Process(_module(theirs, "vllm", str(folder)), _vllm_environment(threads), log)
            try:
                figures = {one.name: _compare(one, pie, vllm, arguments.runs) for one in cases}
                about = [pie.about, vllm.about]
            finally:
                vllm.close()
        finally:
            pie.close()
    Path(log.name).unlink()
    result = {"engines": about, "model": folder.name, "threads": threads, **figures}
    write_result("peers", machine, {**result, "must_reach": {"ratio": MUST_REACH}})
    return 0


def _module(python: str | Path, engine: str, argument: str) -> list[str | Path]:
    return [python, "-m", f"benchmarks.peers.{engine}_contestant", argument]


def _pie_environment() -> Mapping[str, str]:
    """Return what `pie serve` would set."""
    return {"GOMP_SPINCOUNT": SPIN_COUNT} | os.environ


def _vllm_environment(threads: int) -> Mapping[str, str]:
    cores = sorted(os.sched_getaffinity(0))[:threads]
    kept = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(_ROOT),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Left to itself, vLLM keeps one core for its front end.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _compare(case: Case, pie: Process, vllm: Process, runs: int) -> dict[str, object]:
    """Let both run a case in turn, once to warm up; a ratio above 1 is Pie ahead."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(runs + 1):
        for figures, process in ((ours, pie), (theirs, vllm)):
            figure = process.figure(case.name, number)
            if number:
                figures.append(figure)
    first, second = statistics.median(ours), statistics.median(theirs)
    ratio = second / first if case.unit == "s" else first / second
    print(
        f"{case.name}: {first:.3f} / {second:.3f} {case.unit}, ratio {ratio:.2f}", file=sys.stderr
    )
    return {
        "unit": case.unit,
        "pie": _spread(ours),
        "vllm": _spread(theirs),
        "ratio": round(ratio, 2),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
    }


if __name__ == "__main__":
    sys.exit(main())

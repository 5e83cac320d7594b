"""What a figure was measured on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import psutil

_RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "ray", "pyzmq", "redis", "uvicorn")


def describe() -> dict[str, object]:
    """Return the machine, the versions and the commit, as JSON values."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_before": [round(one, 2) for one in os.getloadavg()],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "commit": _commit(),
    }


def write_result(name: str, machine: dict[str, object], result: dict[str, object]) -> None:
    """Show a benchmark's result, and write it to `benchmarks/results/NAME.json`."""
    _RESULTS.mkdir(exist_ok=True)
    file = _RESULTS / f"{name}.json"
    file.write_text(json.dumps({"machine": machine, "result": result}, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    print(f"written to {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"

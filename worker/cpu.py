"""What the CPU says it can do."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU's features as the system names them, such as `avx512_bf16`."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, features = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return frozenset(features.split())
    return frozenset()


def multiplies_bfloat16() -> bool:
    """Say whether it multiplies bfloat16 as it is: where it does not, that is slower than float32."""
    return bool({"avx512_bf16", "amx_bf16"} & cpu_features())

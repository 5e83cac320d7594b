"""Whether a model fits.

Covers the bytes that weights will take and the memory that this process may still take. Does not
cover how pages are budgeted (`pie.worker.arena`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from safetensors import SafetensorError, safe_open

from pie.worker.errors import ModelNotFound, NotEnoughMemory

_HEADROOM_BYTES = 256 << 20
"""Interpreter, libraries and activations."""

_CGROUP_FILES = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def check_memory(
    *, name: str, weights: Sequence[Path], dtype: torch.dtype, kv_bytes: int, device: torch.device
) -> None:
    """Refuse a model whose weights and pages do not fit.

    Raises:
        NotEnoughMemory: Says how much is needed, for what, and how much there is.
    """
    weight_bytes = sum(weight_elements(file) for file in weights) * dtype.itemsize
    needed = weight_bytes + kv_bytes + _HEADROOM_BYTES
    free = free_bytes(device)
    if needed > free:
        raise NotEnoughMemory(
            f"{name} needs {_gib(needed)} GiB ({_gib(weight_bytes)} weights, {_gib(kv_bytes)} "
            f"pages), and {_gib(free)} GiB are free: lower [model] device_kv_budget, take a "
            "smaller dtype or model, or start fewer workers"
        )


def weight_elements(file: Path) -> int:
    """Return how many numbers a weight file holds; of a pickled one, a guess from its size.

    Raises:
        ModelNotFound: It is not a weight file.
    """
    try:
        if file.suffix != ".safetensors":
            return file.stat().st_size // 2
        with safe_open(file, framework="pt") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ModelNotFound(f"cannot read the weights in {file}: {error}") from error


def free_bytes(device: torch.device) -> int:
    """Return the memory that may still be taken, a container's limit included."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    for limit_file, used_file in _CGROUP_FILES:
        try:
            limit, used = limit_file.read_text().strip(), used_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - int(used)))
    return free


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"

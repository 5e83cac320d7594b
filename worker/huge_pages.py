"""Memory in pages of 2 MiB, where the system has them.

Covers tensors that are read from end to end at every step: packed weights, keys and values. In
pages of 4 KiB, looking addresses up takes as long as reading: SmolLM2's layers took 13 ms with them,
8.5 ms without. Does not cover other devices.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch

_CHUNK_BYTES = 64 << 20
_ALIGN_BYTES = 64
"""A cache line."""
_LEAST_BYTES = 64 << 10
"""What is smaller is not worth a piece of them."""


class HugePages:
    """Hands out memory piece by piece; each chunk lives as long as a tensor in it."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._taken = 0

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return zeros; memory is taken from the system as they are first written."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if size < _LEAST_BYTES:
            return torch.zeros(tuple(shape), dtype=dtype)
        if self._chunk is None or self._taken + size > len(self._chunk):
            self._chunk, self._taken = _mapped(max(size, _CHUNK_BYTES)), 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._taken)
        self._taken += -(-size // _ALIGN_BYTES) * _ALIGN_BYTES
        return tensor.view(tuple(shape))

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor."""
        return self.zeros(tensor.shape, tensor.dtype).copy_(tensor)


def _mapped(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A kernel may have been built without them.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory

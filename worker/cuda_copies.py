"""Copies between a CUDA device and host memory that leave the model's stream alone.

Covers pinned staging memory and a stream of its own for each thread that copies. Does not cover
which bytes of a page lie where (`pie.worker.arena`).
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray


class CudaCopies:
    """Copies to and from one device. Safe from any thread.

    A copy does not wait for the model's stream: a page is copied out after the step that wrote it
    has given its tokens, and written before a step is told of it. It has ended when a call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()

    def to_host(self, source: torch.Tensor, out: NDArray[np.uint8]) -> None:
        """Copy a tensor, in the order of its elements, to `out`, which has its size in bytes."""
        stream, pinned = self._mine(out.size)
        with torch.cuda.stream(stream):
            # One copy over the bus, however scattered the page is on the device.
            whole = source.contiguous().flatten().view(torch.uint8)
            pinned.copy_(whole, non_blocking=True)
            stream.synchronize()
        np.copyto(out, pinned.numpy())

    def to_device(self, data: NDArray[np.uint8], target: torch.Tensor) -> None:
        """Copy bytes into a tensor of the same size, in the order of its elements."""
        stream, pinned = self._mine(data.size)
        np.copyto(pinned.numpy(), data)
        with torch.cuda.stream(stream):
            whole = pinned.to(self._device, non_blocking=True)
            target.copy_(whole.view(target.dtype).view(target.shape), non_blocking=True)
            stream.synchronize()

    def _mine(self, size: int) -> tuple[torch.cuda.Stream, torch.Tensor]:
        """Return this thread's stream, and `size` bytes of its pinned memory."""
        local = self._local
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            local.pinned = torch.empty(0, dtype=torch.uint8)
        if local.pinned.numel() < size:
            local.pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        stream: torch.cuda.Stream = local.stream
        pinned: torch.Tensor = local.pinned
        return stream, pinned[:size]

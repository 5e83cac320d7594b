"""Skipped where there is no CUDA device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from pie.worker.cuda_copies import CudaCopies

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_what_goes_out_comes_back_from_any_thread() -> None:
    device = torch.device("cuda")
    memory = torch.randn(4, 64, 100, device=device, dtype=torch.bfloat16)
    before = memory.clone()
    copies = CudaCopies(device)

    def move(page: int) -> None:
        out = np.empty(4 * 100 * 2, np.uint8)
        copies.to_host(memory[:, page], out)
        memory[:, page].zero_()
        torch.cuda.synchronize()
        copies.to_device(out, memory[:, page])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(move, range(64)))
    assert torch.equal(memory, before)

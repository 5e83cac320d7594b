"""Weights in the order that the CPU's matrix instructions want.

Covers packing the linear layers of a loaded model for oneDNN, once, instead of at every product:
with AVX512-BF16, a product with one row is 2.5 times as fast, one with 16 rows 1.7 times, a large
one 5 to 15 %. With AMX, large products may get slower, so a few are timed first. Does not cover
float32, whose products are as fast unpacked, nor other devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from pie.worker.memory import free_bytes

log = logging.getLogger("pie.worker.packing")

_MANY_ROWS = 512
_FEW_ROWS = 64
_SLOWER = 1.15
"""How much slower large products may get before unpacked weights are kept for them."""
_TRIALS = 5
_TRIAL_LIMIT_S = 1.0


class PackedLinear(nn.Module):
    """A linear layer with packed weights; computes what the one it was made of did."""

    def __init__(self, linear: nn.Linear, *, packed_rows: int | None) -> None:
        """Pack.

        Args:
            linear: The layer to replace.
            packed_rows: Products of more rows take the unpacked weight; None lets go of it.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed = _pack(linear.weight)
        self.packed_rows = packed_rows
        # Models ask for its dtype; without data it takes no memory.
        self.weight = linear.weight if packed_rows is not None else linear.weight.to("meta")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows @ weight.T + bias`, `[…, out_features]`."""
        if self.packed_rows is not None and rows.numel() // self.in_features > self.packed_rows:
            return nn.functional.linear(rows, self.weight, self.bias)
        return _product(rows, self.packed, self.bias)


def pack_weights(module: nn.Module, *, dtype: torch.dtype, device: torch.device) -> int:
    """Replace a model's linear layers by packed ones where that helps; return how many."""
    supported: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
    if device.type != "cpu" or dtype is not torch.bfloat16 or not supported():
        return 0
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    if not found:
        return 0
    with torch.inference_mode():
        packed_rows = _packed_rows([linear for _, _, linear in found])
        if packed_rows == 0:
            return 0
        for parent, name, linear in found:
            setattr(parent, name, PackedLinear(linear, packed_rows=packed_rows))
    return len(found)


def _packed_rows(linears: list[nn.Linear]) -> int | None:
    """Return the most rows that packed weights are good for: None is any number, 0 is none."""
    sizes = sorted({linear.weight.numel() for linear in linears})
    # The middle one: the largest is the output layer, which never sees many rows.
    linear = next(x for x in linears if x.weight.numel() == sizes[(len(sizes) - 1) // 2])
    rows = linear.weight.new_ones((_MANY_ROWS, linear.in_features))
    packed = _pack(linear.weight)
    plain_s = _best_s(lambda: nn.functional.linear(rows, linear.weight))
    packed_s = _best_s(lambda: _product(rows, packed, None))
    if packed_s <= _SLOWER * plain_s:
        return None
    both = sum(one.weight.numel() * one.weight.element_size() for one in linears)
    enough = free_bytes(linear.weight.device) > 2 * both
    log.info(
        "packed weights make large products %.1f times as slow here: %s",
        packed_s / plain_s,
        "keeping both kinds" if enough else "keeping them unpacked",
    )
    return _FEW_ROWS if enough else 0


def _best_s(run: Callable[[], torch.Tensor]) -> float:
    started_s = time.perf_counter()
    run()
    best_s = float("inf")
    for _ in range(_TRIALS):
        before_s = time.perf_counter()
        run()
        after_s = time.perf_counter()
        best_s = min(best_s, after_s - before_s)
        if after_s - started_s > _TRIAL_LIMIT_S:
            break
    return best_s


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # noqa: SLF001
    return packed


def _product(rows: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
        rows, packed, bias, "none", [], ""
    )
    return product

"""Weights in the order that the CPU's matrix instructions want.

Covers packing the linear layers of a loaded model for oneDNN, once, instead of at every product.
With AVX512-BF16, a product with one row is 2.5 times as fast, one with 16 rows 1.7 times, one with
512 rows 1.1 times. With AMX, products with many rows were slower, so both kinds are kept there.
Does not cover float32, whose products are as fast unpacked, nor other devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from pie.worker.cpu import cpu_features
from pie.worker.memory import free_bytes

log = logging.getLogger("pie.worker.packing")

_FEW_ROWS = 64
"""Where both kinds are kept, products with more rows take the unpacked one."""


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
        if self.packed_rows is not None and rows.numel() > self.packed_rows * self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, self.packed, self.bias, "none", [], ""
        )
        return product


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
    packed_rows = None
    if "amx_bf16" in cpu_features():
        size = sum(linear.weight.nbytes for _, _, linear in found)
        packed_rows = _FEW_ROWS if free_bytes(device) > 2 * size else None
    with torch.inference_mode():
        for parent, name, linear in found:
            setattr(parent, name, PackedLinear(linear, packed_rows=packed_rows))
    return len(found)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())  # noqa: SLF001
    return packed

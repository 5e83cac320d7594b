"""Weights in the order that the CPU's matrix instructions want.

Covers packing the linear layers of a loaded model, once, instead of at every product: in panels for
our own kernel where it was built, else for oneDNN. With AVX512-BF16, oneDNN's product with one row
is 2.5 times as fast packed, one with 16 rows 1.7 times, one with 512 rows 1.1 times; the kernel reads
weights another 1.6 times as fast with few rows. With AMX, products with many rows were slower packed,
so both kinds are kept there. Where our kernel was built, logits come out in float32: among large ones
bfloat16 has steps of an eighth, and likely tokens come out equal. Does not cover float32, whose
products are as fast unpacked, layers that run as one operation (`pie.worker.fusing`), nor other devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from pie.worker.cpu import cpu_features, multiplies_bfloat16
from pie.worker.fusing import fused_layers
from pie.worker.huge_pages import HugePages
from pie.worker.memory import free_bytes
from pie.worker.native.panels import FEW_ROWS, pack, width_of

log = logging.getLogger("pie.worker.packing")

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies rows with a weight."""


class PackedLinear(nn.Module):
    """A linear layer with packed weights; computes what the one it was made of did."""

    def __init__(self, linear: nn.Linear, product: Product, *, packed_rows: int | None) -> None:
        """Pack.

        Args:
            linear: The layer to replace.
            product: Multiplies rows with its packed weight.
            packed_rows: Products of more rows take the unpacked weight; None lets go of it.
        """
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.packed_rows = packed_rows
        self._product = product
        # Models ask for its dtype; without data it takes no memory.
        self.weight = linear.weight if packed_rows is not None else linear.weight.to("meta")

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `rows @ weight.T + bias`, `[…, out_features]`."""
        if self.packed_rows is not None and rows.numel() > self.packed_rows * self.in_features:
            return nn.functional.linear(rows, self.weight, self.bias)
        return self._product(rows)


def pack_weights(
    module: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    kv_bytes: int,
    has_kernels: bool,
) -> int:
    """Replace a model's linear layers by packed ones where that helps; return how many.

    Args:
        module: Whose layers that can be fused have been.
        dtype: Of its weights.
        device: Where they are.
        kv_bytes: Memory that pages are going to take.
        has_kernels: Whether our own kernels were built.
    """
    supported: Callable[[], bool] = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
    if device.type != "cpu" or dtype is not torch.bfloat16 or not supported():
        return 0
    has_amx = "amx_bf16" in cpu_features()
    # With AMX these take their unpacked weights, of which there are two kinds already.
    done = (
        {part for layer in fused_layers(module) for part in layer.modules()} if has_amx else set()
    )
    found = [
        (parent, name, child)
        for parent in module.modules()
        if parent not in done
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]
    size = sum(linear.weight.nbytes for _, _, linear in found)
    few = FEW_ROWS if has_amx and free_bytes(device) - kv_bytes > 2 * size else None
    head = getattr(module, "get_output_embeddings", lambda: None)()
    memory = HugePages()
    with torch.inference_mode():
        for parent, name, linear in found:
            product, packed_rows = None, few
            if linear is head and has_kernels and multiplies_bfloat16():
                product = in_panels(linear, memory, to_float32=True)
                packed_rows = few if product is None else None
            elif has_kernels and few is not None:
                product = in_panels(linear, memory)
            packed = PackedLinear(linear, product or in_onednn(linear), packed_rows=packed_rows)
            setattr(parent, name, packed)
    return len(found)


def in_panels(linear: nn.Linear, memory: HugePages, *, to_float32: bool = False) -> Product | None:
    """Return the product of our own kernel, for few rows; None where a weight has no panels.

    Args:
        linear: The layer.
        memory: For its packed weight.
        to_float32: Whether the result is not rounded to the weight's dtype.
    """
    width = width_of(linear.out_features, linear.in_features, linear.weight.dtype)
    if width is None:
        return None
    weight, bias = memory.copy(pack(linear.weight, width)), linear.bias

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.pie.linear(rows, weight, bias, to_float32)
        return out

    return product


def in_onednn(linear: nn.Linear) -> Product:
    """Return oneDNN's product with a weight packed for it."""
    weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(  # noqa: SLF001
        linear.weight.detach()
    )
    bias = linear.bias

    def product(rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(  # noqa: SLF001
            rows, weight, bias, "none", [], ""
        )
        return out

    return product

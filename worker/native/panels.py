"""Weights as the CPU kernels read them: panels of columns, each in one piece of memory.

Covers laying a matrix out for `torch.ops.pie.linear` and `torch.ops.pie.decoder_layer`. Does not
cover which layers are laid out so (`pie.worker.packing`, `pie.worker.fusing`).
"""

from __future__ import annotations

import torch

FEW_ROWS = 64
"""Single products of more rows are bound by arithmetic: oneDNN does them as well, unpacked."""

_WIDTHS = (32, 16)
"""In the order in which they were faster: 32 columns keep both tiles of an AMX product busy."""


def pack(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Return `[outputs, inputs]` as `[panels, inputs / pair, width, pair]`.

    Inputs of two-byte types lie in pairs, as matrix instructions take them; others alone.

    Args:
        weight: The width divides its outputs, the pair its inputs.
        width: Outputs of one panel.
    """
    outputs, inputs = weight.shape
    pair = _pair(weight.dtype)
    parts = weight.detach().view(outputs // width, width, inputs // pair, pair)
    return parts.permute(0, 2, 1, 3).contiguous()


def width_of(outputs: int, inputs: int, dtype: torch.dtype) -> int | None:
    """Return how wide the panels of a weight are to be; None where it has no such layout."""
    if inputs % _pair(dtype):
        return None
    return next((width for width in _WIDTHS if outputs % width == 0), None)


def _pair(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 2 else 1

"""What one decoder layer is to `torch.ops.pie.decoder_layer`.

Covers its weights. Does not cover where they come from (`pie.worker.fusing`) or the operation
itself (`layer.h`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer's weights; matrices in panels (`pie.worker.native.panels`)."""

    input_norm: torch.Tensor
    """`[hidden]`"""
    qkv: torch.Tensor
    """A panel for each query head, then each head of keys, then of values."""
    qkv_bias: torch.Tensor | None
    """`[(query_heads + 2 × kv_heads) × head_dim]`"""
    query_norm: torch.Tensor | None
    """`[head_dim]`"""
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    """Each panel holds columns of the gate and, behind them, the same ones of `up`."""
    down: torch.Tensor
    epsilon: float
    """Of all its norms."""

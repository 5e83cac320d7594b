"""Tiny models in float64, run over a whole text at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tests.support import masked as support
from tests.support.models import tiny_module


@functools.cache
def reference(kind: str) -> PreTrainedModel:
    return tiny_module(kind).double()


def masked(
    kind: str,
    tokens: Sequence[int],
    allowed: torch.Tensor,
    positions: Sequence[int] | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """See `tests.support.masked.masked`."""
    return support.masked(reference(kind), tokens, allowed, positions)

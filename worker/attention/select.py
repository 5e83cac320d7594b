"""Which attention backends a model runs on.

Covers the choice by name and by what a backend can do. Does not cover the choice per span
(`pie.worker.step`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pie.worker.attention.protocol import AttentionBackend, AttentionSpec
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.errors import UnsupportedModel

NAMES = ("auto", "torch")


def choose(
    name: str, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> list[AttentionBackend]:
    """Return backends in order of preference; the last of them takes every span.

    Raises:
        UnsupportedModel: There is no backend of this name, or it cannot run the model.
    """
    if name not in NAMES:
        raise UnsupportedModel(
            f"there is no attention backend {name!r}: [model] attention is one of "
            f"{', '.join(NAMES)}"
        )
    fallback = TorchBackend()
    return [fallback]

"""Which attention backends a model runs on.

Covers the choice by name and by what a backend can do. Does not cover the choice per span
(`pie.worker.step`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from pie.worker.attention.flash_packages import FlashUnavailable, flash_backend
from pie.worker.attention.native import native_backend
from pie.worker.attention.protocol import AttentionBackend, AttentionSpec
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.errors import UnsupportedModel

log = logging.getLogger("pie.worker.attention.select")

NAMES = ("auto", "flash", "native", "torch")


def choose(
    name: str,
    specs: Sequence[AttentionSpec],
    *,
    dtype: torch.dtype,
    device: torch.device,
    cache_folder: Path,
) -> list[AttentionBackend]:
    """Return backends in order of preference; the last of them takes every span.

    Args:
        name: One of `NAMES`.
        specs: Each layer's attention.
        dtype: The model's.
        device: The model's.
        cache_folder: Where compiled backends are kept.

    Raises:
        UnsupportedModel: There is no backend of this name, or it cannot run the model here.
    """
    fallback: AttentionBackend = TorchBackend()
    if name == "torch":
        return [fallback]
    if name not in NAMES:
        raise UnsupportedModel(
            f"there is no attention backend {name!r}: [model] attention is one of "
            f"{', '.join(NAMES)}"
        )
    if name == "flash" or (name == "auto" and device.type == "cuda"):
        try:
            return [_flash(specs, dtype, device), fallback]
        except FlashUnavailable as error:
            if name == "flash":
                raise UnsupportedModel(
                    f"the flash attention backend cannot run this model: {error}: "
                    "set [model] attention to auto"
                ) from error
            log.info("attention runs on torch, without a flash kernel: %s", error)
    native: AttentionBackend | None = None
    if device.type == "cpu":
        native = native_backend(cache_folder)
    if native is not None and _can(native, specs, dtype, device):
        return [native, fallback]
    if name == "native":
        raise UnsupportedModel(
            f"the native attention backend cannot run this model on {device} in {dtype}: "
            "set [model] attention to auto"
        )
    return [fallback]


def _flash(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    backend = flash_backend(dtype, device)
    if not _can(backend, specs, dtype, device):
        raise FlashUnavailable("its kernels do not do heads of these sizes")
    return backend


def _can(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    able = backend.capabilities
    return (
        device.type in able.devices
        and dtype in able.dtypes
        and all(able.covers(spec) for spec in specs)
    )

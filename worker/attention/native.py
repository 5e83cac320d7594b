"""Attention over pages on a CPU, compiled once per host.

Covers the backend over the operators of `worker/native`, loaded once and checked. Does not cover
building them (`pie.worker.native.build`), or masks, scores and other devices, which go to `torch`.
Where there is no compiler, or what it makes fails the check, there is no such backend, and the log
says why.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from pie.worker.attention import conformance
from pie.worker.attention.protocol import AttentionSpec, Capabilities, Plan, Span
from pie.worker.cpu import multiplies_bfloat16
from pie.worker.native.build import build
from pie.worker.native.layer import LayerWeights

log = logging.getLogger("pie.worker.attention.native")

_CHECKED = ("decode", "mixed", "window")

_loading = threading.Lock()
_loaded: bool | None = None


class NativeBackend:
    """Compiled attention for float32 and bfloat16 on the CPU."""

    name = "native"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        mask=False,
        scores=False,
        softcap=True,
        window=True,
        unequal_dims=True,
    )

    def __init__(self, *, matrix_bfloat16: bool | None = None) -> None:
        """See `native_backend`, which builds and loads what this needs.

        Args:
            matrix_bfloat16: Multiply bfloat16 as it is; False widens it first. None asks the CPU:
                where it has no such instructions, they are emulated and slower than float32.
        """
        if matrix_bfloat16 is None:
            matrix_bfloat16 = multiplies_bfloat16()
        self._matrix_bfloat16 = matrix_bfloat16

    def plan(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> Plan:
        """Lay the spans out for the operator."""
        assert device.type == "cpu"
        return NativePlan(spans, page_tokens, self._matrix_bfloat16)


class NativePlan:
    """One step's spans and page table."""

    def __init__(self, spans: Sequence[Span], page_tokens: int, matrix_bfloat16: bool) -> None:
        rows: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        for span in spans:
            rows.append((span.first_row, span.tokens, span.start, len(table)))
            table.extend(span.page_ids[: -(-span.end // page_tokens)])
        self.spans = torch.tensor(rows)
        self.table = torch.tensor(table)
        self._matrix_bfloat16 = matrix_bfloat16
        self._attend: Callable[..., None] = torch.ops.pie.attend.default

    def attend(
        self,
        layer: int,  # noqa: ARG002
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Plan.attend`."""
        self._attend(
            query,
            keys,
            values,
            out,
            self.spans,
            self.table,
            spec.scaling,
            spec.window or 0,
            spec.softcap or 0.0,
            self._matrix_bfloat16,
        )

    def decoder_layer(
        self,
        spec: AttentionSpec,
        weights: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor | None:
        """Compute a whole decoder layer of this step, to float32; None where its attention is not plain.

        Args:
            spec: The layer's attention.
            weights: Its weights.
            hidden: `[1, tokens, hidden]`, float32 where it comes from such a layer; left as it is.
            cos: `[1, tokens, head_dim]`
            sin: Likewise.
            keys: The arena's, written at `slots`.
            values: Likewise.
            slots: Of each token.
        """
        dim = spec.key_dim
        angles = hidden.numel() // hidden.shape[-1] * dim
        if spec.softcap or spec.value_dim != dim:
            return None
        # Some models keep them in float32, rotate a part of each head, or have one for each axis.
        for one in (cos, sin):
            if one.dtype is not keys.dtype or one.numel() != angles or one.shape[-1] != dim:
                return None
        out: torch.Tensor = torch.ops.pie.decoder_layer(
            hidden,
            weights.input_norm,
            weights.qkv,
            weights.qkv_bias,
            weights.query_norm,
            weights.key_norm,
            weights.output,
            weights.output_bias,
            weights.post_norm,
            weights.gate_up,
            weights.down,
            cos.contiguous(),
            sin.contiguous(),
            keys,
            values,
            slots,
            self.spans,
            self.table,
            weights.epsilon,
            spec.scaling,
            spec.window or 0,
        )
        return out


def native_backend(cache_folder: Path) -> NativeBackend | None:
    """Return the backend, built where this host has not yet; None where it cannot be had.

    The build takes about twenty seconds, once on a host. Safe to call from several processes at once.
    """
    global _loaded  # noqa: PLW0603
    with _loading:
        if _loaded is None:
            try:
                library = build(cache_folder.expanduser())
                # A second library with the same operator, from another folder, aborts the process.
                if not hasattr(torch.ops.pie, "attend"):
                    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
                _check(NativeBackend())
                _loaded = True
            except (OSError, RuntimeError, subprocess.SubprocessError, AssertionError) as error:
                log.warning("attention runs on torch, without the compiled kernel: %s", error)
                _loaded = False
        return NativeBackend() if _loaded else None


def _check(backend: NativeBackend) -> None:
    """Refuse a build that computes wrongly."""
    for case in conformance.CASES:
        if case.name in _CHECKED and case.dtype in backend.capabilities.dtypes:
            conformance.run(backend, case)

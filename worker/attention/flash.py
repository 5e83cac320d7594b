"""Attention over pages by a FlashAttention kernel for sequences of varying length.

Covers what such a kernel is asked (cumulative lengths, a block table, windows, soft caps) and the
backend that lays a step out for it. Does not cover which package's kernel that is
(`pie.worker.attention.flash_packages`) or what a kernel may assume of its arguments
(`pie.worker.attention.flash_contract`). Masks, scores and float32, which no such kernel does, go to
`torch`.

Tri Dao, FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from pie.worker.attention.protocol import AttentionSpec, Capabilities, Plan, Span

TILE_TOKENS = 256
"""No kernel reads more keys at a time. It looks up the pages of a whole tile, also behind the end of
a sequence, so rows of a block table are filled up to whole tiles."""

MOST_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
"""Other heads are padded by copying the whole arena at every call."""


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """The sequences of a call: what all layers of a step share. Tensors are int32, contiguous."""

    cu_seqlens_q: torch.Tensor
    """`[sequences + 1]`: the row of each sequence's first query, and the number of rows."""
    cu_seqlens_k: torch.Tensor
    """`[sequences + 1]`: the same of keys, were they all in a row."""
    seqused_k: torch.Tensor
    """`[sequences]`: keys of each."""
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: torch.Tensor | None
    """`[sequences, most pages]`: each sequence's pages, filled up to whole tiles with pages of its
    own; None where keys and values are in a row."""


class FlashKernel(Protocol):
    """One function of one package: causal attention, aligned to the end of each sequence."""

    name: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    page_multiple: int
    """Pages of a block table hold a multiple of this many tokens."""

    def attend(
        self,
        batch: VarlenBatch,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        scaling: float,
        window: tuple[int, int],
        softcap: float,
    ) -> None:
        """Write each query's attention over its sequence's keys up to its own.

        Args:
            batch: Lengths and pages.
            query: `[rows, query_heads, head_dim]`, neighbours in the last dimension.
            keys: `[pages, page_tokens, kv_heads, head_dim]` with a block table, else
                `[keys of all sequences, kv_heads, head_dim]`.
            values: As `keys`.
            out: Like `query`; all of it is written.
            scaling: Factor of the logits.
            window: Keys before and after a query's own that it attends to; -1 is all of them.
            softcap: 0 is none.
        """


class FlashBackend:
    """Attention by a flash kernel: float16 and bfloat16, without masks and scores."""

    name = "flash"

    def __init__(self, kernel: FlashKernel) -> None:
        self.kernel = kernel
        self.capabilities = Capabilities(
            devices=kernel.devices,
            dtypes=kernel.dtypes,
            mask=False,
            scores=False,
            softcap=True,
            window=True,
            unequal_dims=False,
            most_head_dim=MOST_HEAD_DIM,
            head_dim_multiple=HEAD_DIM_MULTIPLE,
        )

    def plan(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> Plan:
        """Lay the spans out, by pages where the kernel takes pages of this size."""
        return FlashPlan(self.kernel, spans, page_tokens, device)


class FlashPlan:
    """One step: lengths and block table, made once and sent to the device in one copy."""

    def __init__(
        self,
        kernel: FlashKernel,
        spans: Sequence[Span],
        page_tokens: int,
        device: torch.device,
    ) -> None:
        self._kernel = kernel
        lengths = [span.tokens for span in spans]
        ends = [span.end for span in spans]
        in_pages = page_tokens % kernel.page_multiple == 0
        tables = [_whole_tiles(span, page_tokens) for span in spans] if in_pages else []
        width = max(map(len, tables), default=0)
        numbers = [*_cumulative(lengths), *_cumulative(ends), *ends]
        for table in tables:
            numbers += table
            numbers += table[:1] * (width - len(table))
        sent = torch.tensor(numbers, dtype=torch.int32, device=device)
        count = len(spans)
        cu_q, cu_k, used, flat = torch.split(sent, [count + 1, count + 1, count, count * width])
        self._batch = VarlenBatch(
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            seqused_k=used,
            max_seqlen_q=max(lengths),
            max_seqlen_k=max(ends),
            block_table=flat.view(count, width) if in_pages else None,
        )
        self._slots = None if in_pages else _slots(spans, page_tokens, device)
        first = spans[0].first_row
        total = sum(lengths)
        in_order = all(
            span.first_row == first + before
            for span, before in zip(spans, _cumulative(lengths), strict=False)
        )
        self._run = slice(first, first + total) if in_order else None
        self._rows = (
            None
            if in_order
            else torch.tensor(
                [span.first_row + token for span in spans for token in range(span.tokens)],
                device=device,
            )
        )

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
        if self._slots is not None:
            keys = keys.flatten(0, 1).index_select(0, self._slots)
            values = values.flatten(0, 1).index_select(0, self._slots)
        if self._rows is None:
            assert self._run is not None
            query, target = query[self._run], out[self._run]
        else:
            query = query.index_select(0, self._rows)
            target = torch.empty_like(query)
        self._kernel.attend(
            self._batch,
            query,
            keys,
            values,
            target,
            scaling=spec.scaling,
            window=(-1, -1) if spec.window is None else (spec.window - 1, 0),
            softcap=spec.softcap or 0.0,
        )
        if self._rows is not None:
            out.index_copy_(0, self._rows, target)


def _cumulative(counts: Sequence[int]) -> list[int]:
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def _whole_tiles(span: Span, page_tokens: int) -> list[int]:
    """Return a span's pages, and its first one over and over up to a whole tile."""
    pages = list(span.page_ids[: -(-span.end // page_tokens)])
    tiles = -(-span.end // TILE_TOKENS) * TILE_TOKENS
    return pages + pages[:1] * (-(-tiles // page_tokens) - len(pages))


def _slots(spans: Sequence[Span], page_tokens: int, device: torch.device) -> torch.Tensor:
    """Return the arena's slot of every key, sequence after sequence."""
    parts = []
    for span in spans:
        pages = torch.tensor(span.page_ids[: -(-span.end // page_tokens)])
        slots = pages[:, None] * page_tokens + torch.arange(page_tokens)
        parts.append(slots.flatten()[: span.end])
    return torch.cat(parts).to(device)

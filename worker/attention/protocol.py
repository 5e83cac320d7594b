"""What an attention backend is.

Covers the contract between the runner and a backend: what a layer's attention is, which tokens of a
step belong together, what a backend can do. Does not cover how a step is cut into spans
(`pie.worker.runner`) or the suite that proves a backend right (`pie.worker.attention.conformance`).

The rules that every backend keeps, for a token at slot `s` of its sequence:

- It attends to slots `0 … s`; in a layer with a window of `w`, to the last `w` of those.
- Where its span has a mask, to those of them that the mask allows. With none left it gets zeros.
- Query head `h` reads KV head `h // (query_heads // kv_heads)`.
- A logit is `scaling × (q · k)`, then `softcap × tanh(logit / softcap)` where a softcap is set.
  Logits and softmax are at least float32.
- The slots of a span's own tokens are read from the arena, where they have been written before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scaling: float
    window: int | None = None
    """Slots that a token attends to, its own included; None is all before it."""
    softcap: float | None = None

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of one sequence in a step: rows `first_row …` of the step's flat batch."""

    first_row: int
    tokens: int
    start: int
    """Slot of its first token."""
    page_ids: Sequence[int]
    """Physical pages of slots 0, 1, … up to its last token's at least."""
    is_written: bool = True
    """False where the arena's keys and values of its own slots come from an earlier step."""
    mask: torch.Tensor | None = None
    """bool `[tokens, end]`, or `[layers or 1, query_heads or 1, tokens, end]`"""
    scores: torch.Tensor | None = None
    """float32 `[layers, most query_heads of any layer, end]`, zeros: the attention that the last `scores_queries`
    tokens pay to each slot is added to it."""
    scores_queries: int = 0

    @property
    def end(self) -> int:
        """The number of slots after it."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do; what it cannot is done by `torch`."""

    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    mask: bool
    scores: bool
    softcap: bool
    window: bool
    unequal_dims: bool
    """Keys and values of different sizes."""
    most_head_dim: int | None = None
    """Largest head; None takes any."""
    head_dim_multiple: int = 1
    """What a head's size is a multiple of."""

    def covers(self, spec: AttentionSpec) -> bool:
        """Say whether a layer's attention can be computed."""
        return (
            (self.softcap or spec.softcap is None)
            and (self.window or spec.window is None)
            and (self.unequal_dims or spec.key_dim == spec.value_dim)
            and all(map(self._has_heads_of, (spec.key_dim, spec.value_dim)))
        )

    def _has_heads_of(self, dim: int) -> bool:
        fits = self.most_head_dim is None or dim <= self.most_head_dim
        return fits and dim % self.head_dim_multiple == 0

    def takes(self, span: Span) -> bool:
        """Say whether a span can be computed."""
        return (self.mask or span.mask is None) and (self.scores or span.scores is None)


class Plan(Protocol):
    """What a backend prepared for the spans of one step; all layers share it."""

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Compute the plan's spans of one layer.

        Args:
            layer: The layer's index, for scores.
            spec: The layer's attention.
            query: `[rows, query_heads, key_dim]`, any strides but the last.
            key: `[rows, kv_heads, key_dim]`, the step's own; the arena has them too.
            value: `[rows, kv_heads, value_dim]`, likewise.
            keys: The arena's, `[pages, page_tokens, kv_heads, key_dim]`; not written.
            values: The arena's, `[pages, page_tokens, kv_heads, value_dim]`; not written.
            out: `[rows, query_heads, value_dim]`, contiguous; the spans' rows are written.
        """


class AttentionBackend(Protocol):
    """Computes attention over pages."""

    name: str
    capabilities: Capabilities

    def plan(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> Plan:
        """Prepare one step; called once a step, before any layer."""

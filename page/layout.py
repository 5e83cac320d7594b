"""What a page holds, layer by layer.

Covers the parts of a model's pages, their sizes, the layout id that goes into keys, and how long
a leading run of pages can be used. Does not cover where layers lie in memory (`pie.worker`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3

from pie.page.events import Part, PartMask, part_tiers

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One recurrent state of one sequence."""

    shape: tuple[int, ...]
    dtype: str
    """Often `float32`, whatever the model's own dtype."""

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention, or its recurrent states. A layer that has both is two of these.

    Attention sets heads and head sizes, recurrence sets states.
    """

    part: Part
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    """Tokens that a sliding-window layer attends to, the query's own included."""
    states: tuple[StateSpec, ...] = ()
    """The recurrent states of one sequence, in order."""


@dataclass(frozen=True)
class PageLayout:
    """The layers of a model in order, and what a page of it holds."""

    layers: tuple[LayerSpec, ...]
    page_tokens: int
    dtype: str

    @cached_property
    def layout_id(self) -> str:
        """A name for layers by kind, heads, head sizes, states, order and parts."""
        text = ";".join(
            f"{spec.part.name},{spec.kv_heads},{spec.key_dim},{spec.value_dim},"
            f"{spec.window or 0},{'/'.join(_named(state) for state in spec.states)}"
            for spec in self.layers
        )
        return blake3(b"pie/layout" + text.encode()).hexdigest(16)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts that this model's pages have, in order."""
        return tuple(sorted({spec.part for spec in self.layers}))

    @cached_property
    def window_tokens(self) -> int:
        """The largest window of any layer; 0 where no layer has one."""
        return max((spec.window or 0 for spec in self.layers), default=0)

    def part_bytes(self, part: Part) -> int:
        """Return the payload size of one page's `part`."""
        size = DTYPE_BYTES[self.dtype]
        total = 0
        for spec in self.layers:
            if spec.part is not part:
                continue
            if part is Part.STATE:
                total += sum(state.bytes for state in spec.states)
            else:
                per_token = spec.kv_heads * (spec.key_dim + spec.value_dim)
                total += per_token * self.page_tokens * size
        return total

    @cached_property
    def attention_parts(self) -> tuple[Part, ...]:
        """The parts that pages hold slot by slot: all but `state`. A pure recurrent model has none."""
        return tuple(part for part in self.parts if part is not Part.STATE)

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the attention parts of one page."""
        return sum(self.part_bytes(part) for part in self.attention_parts)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the recurrent states of one sequence, and so of a snapshot; 0 without any."""
        return self.part_bytes(Part.STATE)

    def usable(self, masks: Sequence[PartMask]) -> int:
        """Return `usable_run` for this layout."""
        return usable_run(
            masks,
            parts=self.parts,
            window_tokens=self.window_tokens,
            page_tokens=self.page_tokens,
        )


def _named(state: StateSpec) -> str:
    return "x".join(map(str, state.shape)) + f":{state.dtype}"


def usable_run(
    masks: Sequence[PartMask], *, parts: Sequence[Part], window_tokens: int, page_tokens: int
) -> int:
    """Return the longest leading run of pages that can be used.

    `masks[i]` says which parts of page `i` are held. A run of `n` pages can be used when `full`
    is held throughout, `window` over the last window before its end, and `state` at its last
    page, each where the model has that part. The window is a whole one: a prompt that ends with
    the run computes its last token again, which attends to as many tokens before the run's end.
    """
    return usable_segments(
        ((mask, 1) for mask in masks),
        parts=parts,
        window_tokens=window_tokens,
        page_tokens=page_tokens,
    )


def usable_segments(
    segments: Iterable[tuple[PartMask, int]],
    *,
    parts: Sequence[Part],
    window_tokens: int,
    page_tokens: int,
) -> int:
    """Return `usable_run` of masks that are given with how many pages in a row have each."""
    needs_full, needs_window, needs_state = (part in parts for part in Part)
    window_pages = -(-window_tokens // page_tokens)
    best = n = window_run = 0
    for mask, pages in segments:
        if needs_full and not part_tiers(mask, Part.FULL):
            break
        n += pages
        window_run = window_run + pages if part_tiers(mask, Part.WINDOW) else 0
        # Where the run may not end with the last of pages that are alike, it may with none of them.
        if needs_window and window_run < min(window_pages, n):
            continue
        if needs_state and not part_tiers(mask, Part.STATE):
            continue
        best = n
    return best

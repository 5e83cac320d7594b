"""The suite that every attention backend passes.

Covers the cases and the comparison with `pie.worker.attention.reference`; a backend's tests are
`for case in CASES: run(backend, case)`. Does not cover a model around the attention, whose tests
compare with transformers.

Pages are scattered over an arena whose other slots hold large numbers or none at all, as a program's pass
may leave them, so that a backend that reads beside its sequence shows it; so do slots that no token
of a piece attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from pie.worker.attention import reference
from pie.worker.attention.protocol import AttentionBackend, AttentionSpec, Capabilities, Span

_GARBAGE = (60.0, float("nan"))

_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 2e-3}
"""Largest error of an output, over the largest value. A weight is rounded to the dtype before it
meets its value."""

_SCORE_TOLERANCE = 2e-5


@dataclass(frozen=True, slots=True)
class Piece:
    """A span to make: where it starts, how many tokens, and what is special about it."""

    start: int
    tokens: int
    mask: str = ""
    """`""`, `random`, `holes`: random with tokens that may attend to nothing, `dead`: random with slots
    that nothing attends to, or `heads`: another random one for each layer and head."""
    scores_queries: int = 0
    is_written: bool = True


@dataclass(frozen=True, slots=True)
class Case:
    """One step of one layer."""

    name: str
    spec: AttentionSpec
    pieces: tuple[Piece, ...]
    dtype: torch.dtype = torch.float32
    page_tokens: int = 16

    def __str__(self) -> str:
        """Return a name that a test report can show."""
        return f"{self.name}-{str(self.dtype).removeprefix('torch.')}"


class Unsupported(Exception):  # noqa: N818
    """The backend declares that it does not do this."""


def _spec(
    query_heads: int = 6,
    kv_heads: int = 2,
    dim: int = 64,
    *,
    value_dim: int | None = None,
    scaling: float = 0.125,
    window: int | None = None,
    softcap: float | None = None,
) -> AttentionSpec:
    return AttentionSpec(query_heads, kv_heads, dim, value_dim or dim, scaling, window, softcap)


_DECODE = (Piece(0, 1), Piece(15, 1), Piece(16, 1), Piece(40, 1), Piece(203, 1))
_PREFILL = (Piece(0, 37),)
_LONG = (Piece(0, 300), Piece(129, 190))
_CHUNK = (Piece(21, 30), Piece(64, 17))
_MIXED = (
    Piece(0, 37),
    Piece(33, 1),
    Piece(21, 30),
    Piece(200, 1),
    Piece(7, 1),
    Piece(16, 2),
    Piece(0, 1),
)
_FROZEN = (Piece(31, 1, is_written=False), Piece(0, 4, is_written=False), Piece(9, 1))

_FLOAT32 = (
    Case("decode", _spec(), _DECODE),
    Case("long_decode", _spec(), (Piece(0, 1), Piece(699, 1), Piece(350, 1))),
    Case("long_decode_in_a_window", _spec(window=300), (Piece(699, 1), Piece(350, 1))),
    Case("prefill", _spec(), _PREFILL),
    Case("long_prefill", _spec(), _LONG),
    Case("prefill_after_a_prefix", _spec(), _CHUNK),
    Case("mixed", _spec(), _MIXED),
    Case("one_kv_head_for_each_query_head", _spec(4, 4), _MIXED),
    Case("one_kv_head_for_all", _spec(8, 1), _MIXED),
    Case("nine_heads_over_three", _spec(9, 3), _MIXED),
    Case("another_scaling", _spec(scaling=0.5), _MIXED),
    Case("window", _spec(window=20), _MIXED),
    Case("long_window", _spec(window=150), _LONG),
    Case("window_of_one_page", _spec(window=16), _MIXED),
    Case("window_of_one_slot", _spec(window=1), _MIXED),
    Case("window_that_never_bites", _spec(window=4096), _MIXED),
    Case("softcap", _spec(softcap=2.0), _MIXED),
    Case("softcap_and_window", _spec(softcap=2.0, window=20), _MIXED),
    Case("pages_of_4", _spec(), _MIXED, page_tokens=4),
    Case("pages_of_1", _spec(), _MIXED, page_tokens=1),
    Case("pages_of_5", _spec(window=9), _MIXED, page_tokens=5),
    Case("pages_of_128", _spec(), _MIXED, page_tokens=128),
    Case("pages_of_256", _spec(), _MIXED, page_tokens=256),
    Case("small_heads", _spec(dim=16), _MIXED),
    Case("odd_heads", _spec(dim=20), _MIXED),
    Case("heads_of_80", _spec(dim=80), _MIXED),
    Case("large_heads", _spec(2, 1, 256), _MIXED),
    Case("unequal_dims", _spec(dim=48, value_dim=32), _MIXED),
    Case("reads_frozen_pages", _spec(), _FROZEN),
    Case("mask", _spec(), (Piece(0, 20, "random"), Piece(40, 1, "random"), Piece(21, 9, "random"))),
    Case("mask_that_leaves_nothing", _spec(), (Piece(0, 20, "holes"), Piece(33, 1, "holes"))),
    Case("mask_over_dead_slots", _spec(), (Piece(20, 20, "dead"), Piece(40, 1, "dead"))),
    Case("mask_of_heads", _spec(), (Piece(0, 20, "heads"), Piece(40, 1, "heads"), Piece(5, 3))),
    Case("mask_of_heads_and_window", _spec(window=12), (Piece(30, 9, "heads", 2), Piece(50, 1))),
    Case("mask_and_window", _spec(window=12), (Piece(30, 9, "holes"), Piece(50, 1))),
    Case(
        "scores",
        _spec(),
        (Piece(0, 20, "", 4), Piece(40, 1, "", 1), Piece(21, 9), Piece(3, 5, "", 5)),
    ),
    Case(
        "scores_and_mask", _spec(window=12), (Piece(30, 9, "random", 3), Piece(50, 1, "holes", 1))
    ),
    Case("scores_and_softcap", _spec(softcap=2.0), (Piece(30, 9, "", 3), Piece(2, 1))),
)

CASES: tuple[Case, ...] = (
    *_FLOAT32,
    *(replace(case, dtype=torch.bfloat16) for case in _FLOAT32),
    *(
        replace(case, dtype=torch.float16)
        for case in _FLOAT32
        if case.name in {"decode", "mixed", "window"}
    ),
)
"""Every case in float32 and bfloat16, some in float16."""


def run(backend: AttentionBackend, case: Case, device: torch.device | str = "cpu") -> float:
    """Run a case and return the largest error over the largest value.

    Raises:
        Unsupported: The backend declares that it cannot; not a failure.
        AssertionError: The result is wrong.
    """
    device = torch.device(device)
    step = _Step(case, device)
    able = backend.capabilities
    if device.type not in able.devices or case not in declared(able):
        raise Unsupported(f"{backend.name} does not do {case}")
    plan = backend.plan(step.spans, case.page_tokens, device)
    out = torch.full(
        (step.query.shape[0], case.spec.query_heads, case.spec.value_dim),
        float("nan"),
        dtype=case.dtype,
        device=device,
    )
    before = (step.keys.clone(), step.values.clone())
    with torch.inference_mode():
        plan.attend(1, case.spec, step.query, step.key, step.value, step.keys, step.values, out)
    want, want_scores = _expected(case)
    assert _same(before[0], step.keys), f"{case}: the arena's keys were written"
    assert _same(before[1], step.values), f"{case}: the arena's values were written"
    error = float((out.cpu().double() - want).abs().max() / want.abs().max())
    assert error <= _TOLERANCE[case.dtype], f"{case}: outputs are off by {error:.2e}"
    for span, scores in zip(step.spans, want_scores, strict=True):
        if span.scores is not None:
            off = float((span.scores[1].cpu().double() - scores).abs().max())
            assert off <= _SCORE_TOLERANCE, f"{case}: scores are off by {off:.2e}"
            assert not span.scores[0].any(), f"{case}: another layer's scores were written"
    return error


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether two tensors hold the same bytes: NaN is like itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class _Step:
    """The tensors of a case: an arena of garbage, and sequences on scattered pages of it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        draw = torch.Generator().manual_seed(1)
        spec, page_tokens = case.spec, case.page_tokens
        pages = [-(-(p.start + p.tokens) // page_tokens) for p in case.pieces]
        total = sum(pages) + 3
        scattered = torch.randperm(total, generator=draw).tolist()

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw).to(case.dtype)

        rows = sum(piece.tokens for piece in case.pieces)
        self.query = noise(rows, spec.query_heads, spec.key_dim)
        self.key = noise(rows, spec.kv_heads, spec.key_dim)
        self.value = noise(rows, spec.kv_heads, spec.value_dim)
        self.keys = _garbage(case, total, spec.kv_heads, spec.key_dim)
        self.values = _garbage(case, total, spec.kv_heads, spec.value_dim)
        self.spans: list[Span] = []
        row = 0
        for piece, count in zip(case.pieces, pages, strict=True):
            page_ids, scattered = scattered[:count], scattered[count:]
            end = piece.start + piece.tokens
            for slot in range(end):
                page, offset = page_ids[slot // page_tokens], slot % page_tokens
                if slot >= piece.start and piece.is_written:
                    self.keys[page, offset] = self.key[row + slot - piece.start]
                    self.values[page, offset] = self.value[row + slot - piece.start]
                else:
                    self.keys[page, offset] = noise(spec.kv_heads, spec.key_dim)
                    self.values[page, offset] = noise(spec.kv_heads, spec.value_dim)
            mask = _mask(piece, end, draw, spec.query_heads)
            if piece.mask == "dead":
                assert mask is not None
                for slot in (~mask.any(0)).nonzero().flatten().tolist():
                    page, offset = page_ids[slot // page_tokens], slot % page_tokens
                    self.keys[page, offset] = self.values[page, offset] = float("nan")
            scores = (
                torch.zeros((2, spec.query_heads, end), device=device)
                if piece.scores_queries
                else None
            )
            self.spans.append(
                Span(
                    first_row=row,
                    tokens=piece.tokens,
                    start=piece.start,
                    page_ids=page_ids,
                    is_written=piece.is_written,
                    mask=mask,
                    scores=scores,
                    scores_queries=piece.scores_queries,
                )
            )
            row += piece.tokens
        for name in ("query", "key", "value", "keys", "values"):
            setattr(self, name, getattr(self, name).to(device))


def _garbage(case: Case, pages: int, kv_heads: int, dim: int) -> torch.Tensor:
    """Return an arena in which nothing was written, `[pages, page_tokens, kv_heads, dim]`."""
    arena = torch.full((pages, case.page_tokens, kv_heads, dim), _GARBAGE[0], dtype=case.dtype)
    arena[:, 1::2] = _GARBAGE[1]
    return arena


@cache
def _expected(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return what the reference makes of a case; several backends are compared with it."""
    step = _Step(case, torch.device("cpu"))
    return reference.attend(case.spec, step.spans, step.query, step.keys, step.values, layer=1)


def _mask(piece: Piece, end: int, draw: torch.Generator, query_heads: int) -> torch.Tensor | None:
    if not piece.mask:
        return None
    outer = (2, query_heads) if piece.mask == "heads" else ()
    mask = torch.rand((*outer, piece.tokens, end), generator=draw) < 0.6
    own = torch.arange(piece.start, end)
    mask[..., torch.arange(piece.tokens), own] = True
    if piece.mask == "dead":
        mask[:, 3 : piece.start : 5] = False
    if piece.mask == "holes":
        mask[:: max(1, piece.tokens // 3)] = False
    return mask


def declared(able: Capabilities) -> tuple[Case, ...]:
    """Return the cases that a backend declares it can do."""
    return tuple(
        case
        for case in CASES
        if case.dtype in able.dtypes
        and able.covers(case.spec)
        and (able.mask or not any(piece.mask for piece in case.pieces))
        and (able.scores or not any(piece.scores_queries for piece in case.pieces))
    )


def names(cases: Sequence[Case] = CASES) -> list[str]:
    """Return the cases' names, for a test's `ids`."""
    return [str(case) for case in cases]

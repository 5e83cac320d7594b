"""Draws the next token of every sequence in a step from its logits.

Covers bias, penalties, temperature, top-k, top-p, min-p and seeded draws, over all rows of a step
at once. Does not cover log-probabilities (`pie.worker.logprobs`) or when a sequence ends
(`pie.worker.generation`).

In this order: logit bias and penalties are added to the logits; temperature divides them; top-k,
then top-p of what is left, then min-p relative to the likeliest token narrow the choice; the draw
takes the first token, in order of ids, at which the cumulative probability passes the uniform
number. Tokens that tie with the last one kept are kept too, so that the choice does not depend on
the order of a sort.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pie.wire.messages import Sampling
from pie.worker.draws import uniform

_NUCLEUS = 512
"""Tokens sorted at first for top-p; a flatter distribution is sorted whole. A whole sort of 49,152
tokens takes 3 ms a row."""


_GREEDY_BELOW = 1e-5
"""Temperatures up to this one are greedy: float32 could not tell them from it."""


@dataclass(slots=True)
class SamplingRow:
    """How one row is drawn."""

    sampling: Sampling
    seed: int
    position: int
    """Output position of the token to draw, counted from 0."""
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token was generated so far."""


def finite_rows(logits: torch.Tensor) -> list[bool]:
    """Return for each row of `[rows, vocab]` whether a token can be drawn from it.

    False for a row with a NaN or a positive infinity, or without any finite number.
    """
    # The largest of a row is NaN where any is.
    return [math.isfinite(value) for value in logits.amax(dim=-1).tolist()]


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Return the token drawn for each row.

    Args:
        logits: float32 `[rows, vocab]`; left as they are.
        rows: One for each.
    """
    adjusted = _adjust(logits, rows)
    tokens: list[int] = adjusted.argmax(dim=-1).tolist()
    random = [i for i, row in enumerate(rows) if row.sampling.temperature > _GREEDY_BELOW]
    if random:
        chosen = _draw_random(adjusted[random], [rows[index] for index in random])
        for index, token in zip(random, chosen, strict=True):
            tokens[index] = token
    return tokens


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Add logit bias and penalties; returns `logits` itself where no row has any."""
    at: list[int] = []
    ids: list[int] = []
    values: list[float] = []
    vocab = logits.shape[-1]
    for index, row in enumerate(rows):
        sampling = row.sampling
        changes = dict(sampling.logit_bias)
        if sampling.frequency_penalty or sampling.presence_penalty:
            for token, count in row.counts.items():
                penalty = sampling.frequency_penalty * count + sampling.presence_penalty
                changes[token] = changes.get(token, 0.0) - penalty
        for token, value in changes.items():
            if 0 <= token < vocab:
                at.append(index)
                ids.append(token)
                values.append(value)
    if not at:
        return logits
    where = (
        torch.tensor(at, device=logits.device),
        torch.tensor(ids, device=logits.device),
    )
    change = torch.tensor(values, dtype=logits.dtype, device=logits.device)
    return logits.index_put(where, change, accumulate=True)


def _draw_random(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    device = logits.device
    samplings = [row.sampling for row in rows]
    temperature = torch.tensor([s.temperature for s in samplings], device=device)
    # Shifted first: a tiny temperature must not turn the largest logit into infinity.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / temperature[:, None]
    _keep_top_k(scaled, samplings)
    probabilities = scaled.softmax(dim=-1)
    _keep_top_p(probabilities, samplings)
    _keep_min_p(probabilities, samplings)
    cumulative = probabilities.double().cumsum(dim=-1)
    draws = torch.tensor(
        [uniform(row.seed, row.position) for row in rows], dtype=torch.float64, device=device
    )
    # The draw is below 1, so a token is passed; rounding could still reach the total.
    threshold = draws * cumulative[:, -1]
    index = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    tokens: list[int] = index.tolist()
    last = _last_kept(probabilities)
    return [min(token, end) for token, end in zip(tokens, last, strict=True)]


def _last_kept(probabilities: torch.Tensor) -> list[int]:
    """Return the largest id of each row that can be drawn."""
    flipped = (probabilities > 0).flip(-1).to(torch.uint8)
    last: list[int] = (probabilities.shape[-1] - 1 - flipped.argmax(dim=-1)).tolist()
    return last


def _keep_top_k(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Set all but the `top_k` largest of each row to minus infinity, in place."""
    vocab = scaled.shape[-1]
    for index, sampling in enumerate(samplings):
        if 0 < sampling.top_k < vocab:
            row = scaled[index]
            least = row.topk(sampling.top_k).values[-1]
            row.masked_fill_(row < least, -torch.inf)


def _keep_top_p(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero all but the fewest likeliest tokens of each row that hold `top_p`, in place."""
    vocab = probabilities.shape[-1]
    for index, sampling in enumerate(samplings):
        if sampling.top_p >= 1:
            continue
        row = probabilities[index]
        for size in (min(_NUCLEUS, vocab), vocab):
            likeliest = row.topk(size).values
            mass = likeliest.double().cumsum(dim=-1)
            if size == vocab or mass[-1] >= sampling.top_p:
                kept = min(int((mass < sampling.top_p).sum()), size - 1)
                row.masked_fill_(row < likeliest[kept], 0)
                break


def _keep_min_p(probabilities: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero what is less likely than `min_p` of the likeliest token of each row, in place."""
    if all(sampling.min_p <= 0 for sampling in samplings):
        return
    min_p = torch.tensor([s.min_p for s in samplings], device=probabilities.device)
    least = probabilities.amax(dim=-1, keepdim=True) * min_p[:, None]
    probabilities.masked_fill_(probabilities < least, 0)

"""Draws the next token of every sequence in a step from its logits.

Covers bias, penalties, grammars, temperature, top-k, top-p, min-p and seeded draws, over all rows of
a step at once. Does not cover log-probabilities (`pie.worker.logprobs`) or when a sequence ends
(`pie.worker.generation`).

In this order: the repetition penalty scales logits, logit bias and the other penalties are added to
them; what may not come next is left out; temperature divides the rest; top-k,
then top-p of what is left, then min-p relative to the likeliest token narrow the choice; the draw
takes the first token, in order of ids, at which the cumulative probability passes the uniform
number. Tokens that tie with the last one kept are kept too, so that the choice does not depend on
the order of a sort.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence, Set as AbstractSet
from dataclasses import dataclass, field

import torch

from pie.wire.messages import Sampling
from pie.worker.draws import uniform
from pie.worker.grammar import Constraint

_NUCLEI = (512, 8192)
"""Likeliest tokens looked at for top-p before all: of 49,152 they take 0.1, 0.6 and 3 ms a row."""

_GREEDY_BELOW = 1e-5
"""Temperatures up to this one are greedy: float32 could not tell them from it."""

_BLOCK = 256


@dataclass(slots=True)
class SamplingRow:
    """How one row is drawn."""

    sampling: Sampling
    seed: int
    position: int
    """Output position of the token to draw, counted from 0."""
    counts: Counter[int] = field(default_factory=Counter)
    """How often each token was generated so far."""
    seen: set[int] = field(default_factory=set)
    """Tokens of prompt and output, where there is a repetition penalty."""
    ends: AbstractSet[int] = frozenset()
    """Tokens that may not come before `Sampling.min_tokens`."""
    constraint: Constraint | None = None
    """What the answer must match, which goes before `ends` and bad words."""
    tail: deque[int] = field(default_factory=deque)
    """The latest tokens of the output, as many as a bad word has before its last."""


def bad_word_tail(sampling: Sampling, output: Iterable[int]) -> deque[int]:
    """Return what a row must remember of its output to keep bad words out."""
    longest = max(map(len, sampling.bad_words), default=1)
    return deque(output, maxlen=longest - 1)


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
    """Apply bias, penalties and what is not allowed; returns `logits` itself where no row has any."""
    adjusted = _penalise(logits, rows)
    return _allow(adjusted, rows, is_ours=adjusted is not logits)


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Scale and add what rows ask for; returns `logits` itself where none does."""
    logits = _scale_seen(logits, rows)
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


def _scale_seen(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Apply the repetition penalty of Keskar et al. (2019); the same tensor where there is none."""
    vocab, scaled = logits.shape[-1], logits
    for index, row in enumerate(rows):
        penalty = row.sampling.repetition_penalty
        ids = [token for token in row.seen if token < vocab]
        if penalty == 1 or not ids:
            continue
        if scaled is logits:
            scaled = logits.clone()
        where = torch.tensor(ids, device=logits.device)
        values = scaled[index, where]
        scaled[index, where] = torch.where(values > 0, values / penalty, values * penalty)
    return scaled


def _allow(logits: torch.Tensor, rows: Sequence[SamplingRow], *, is_ours: bool) -> torch.Tensor:
    """Leave out what may not come next; the same tensor where everything may.

    A row whose grammar failed is left as it is: its request learns that when it takes the token.
    """
    for index, row in enumerate(rows):
        if row.constraint is not None:
            allowed = row.constraint.allowed()
            if allowed is None:
                continue
            forbidden = ~allowed.to(logits.device)
        elif ids := [token for token in _forbidden(row) if 0 <= token < logits.shape[-1]]:
            forbidden = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            forbidden[ids] = True
        else:
            continue
        if not is_ours:
            logits, is_ours = logits.clone(), True
        logits[index].masked_fill_(forbidden, -torch.inf)
    return logits


def _forbidden(row: SamplingRow) -> Iterator[int]:
    """Yield the tokens that may not come next, because of what came before."""
    if row.position < row.sampling.min_tokens:
        yield from row.ends
    tail = tuple(row.tail)
    for *before, last in row.sampling.bad_words:
        if tuple(before) == tail[len(tail) - len(before) :]:
            yield last


def _draw_random(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    device = logits.device
    samplings = [row.sampling for row in rows]
    temperature = torch.tensor([s.temperature for s in samplings], device=device)
    # Shifted first: a tiny temperature must not turn the largest logit into infinity. So the
    # likeliest token's weight is 1.
    weights = (logits - logits.amax(dim=-1, keepdim=True)).div_(temperature[:, None])
    _keep_top_k(weights, samplings)
    weights.exp_()
    _keep_top_p(weights, samplings)
    _keep_min_p(weights, samplings)
    draws = [uniform(row.seed, row.position) for row in rows]
    return _pick(weights, torch.tensor(draws, dtype=torch.float64, device=device))


def _pick(weights: torch.Tensor, draws: torch.Tensor) -> list[int]:
    """Return for each row the first token at which the cumulative share passes its draw.

    Sums blocks first and then goes through one: a cumulative sum of whole rows takes 0.3 ms each.
    """
    rows, vocab = weights.shape
    blocks = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK)).view(rows, -1, _BLOCK)
    ends = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    # A draw is below 1, so some token passes it; rounding could still reach the total.
    total = ends[:, -1]
    passed = (draws * total).minimum(total.nextafter(torch.zeros_like(total)))[:, None]
    # Weights that are not numbers pass nothing: a wrong token, and nothing outside of the row.
    block = torch.searchsorted(ends, passed, right=True).clamp(max=ends.shape[1] - 1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0]
    at = torch.searchsorted(before + inside.cumsum(dim=-1, dtype=torch.float64), passed, right=True)
    numbers = torch.arange(_BLOCK, device=weights.device)
    last = torch.where(inside > 0, numbers, 0).amax(dim=-1, keepdim=True)
    tokens: list[int] = (block * _BLOCK + at.minimum(last))[:, 0].tolist()
    return tokens


def _keep_top_k(scaled: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Set all but the `top_k` largest of each row to minus infinity, in place."""
    vocab = scaled.shape[-1]
    for index, sampling in enumerate(samplings):
        if 0 < sampling.top_k < vocab:
            row = scaled[index]
            least = row.topk(sampling.top_k).values[-1]
            row.masked_fill_(row < least, -torch.inf)


def _keep_top_p(weights: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero all but the fewest likeliest tokens of each row that hold `top_p`, in place."""
    vocab = weights.shape[-1]
    for index, sampling in enumerate(samplings):
        if sampling.top_p >= 1:
            continue
        row = weights[index]
        enough = sampling.top_p * row.sum(dtype=torch.float64)
        for size in (*(size for size in _NUCLEI if size < vocab), vocab):
            likeliest = row.topk(size).values
            mass = likeliest.cumsum(dim=-1, dtype=torch.float64)
            if size == vocab or mass[-1] >= enough:
                kept = min(int((mass < enough).sum()), size - 1)
                row.masked_fill_(row < likeliest[kept], 0)
                break


def _keep_min_p(weights: torch.Tensor, samplings: Sequence[Sampling]) -> None:
    """Zero what is less likely than `min_p` of the likeliest token of each row, in place."""
    if all(sampling.min_p <= 0 for sampling in samplings):
        return
    min_p = torch.tensor([s.min_p for s in samplings], device=weights.device)
    weights.masked_fill_(weights < min_p[:, None], 0)

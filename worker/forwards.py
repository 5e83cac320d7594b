"""How the batch of a recurrent model is cut into forward passes, and put together again.

Covers the shapes that transformers computes rightly: rows of one token that each go on from a
state, or one row of tokens. Pure. Does not cover running them (`pie.worker.runner`). A model
without recurrent layers needs none of this: all its passes are one row of tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from pie.worker.batch import Batch, LogitRows, Pass, StepOutput


@dataclass(frozen=True, slots=True)
class Forward:
    """One call of the model."""

    passes: Sequence[Pass]
    as_rows: bool = False
    """Whether each pass is a row of one token; else all are in one row."""
    origins: Sequence[int] = field(default=())
    """For each pass, which one of the batch it is a piece of."""


def cut(passes: Sequence[Pass], *, stepped: bool) -> list[Forward]:
    """Return the calls that make up a batch, in the order to run them in.

    Args:
        passes: The batch's.
        stepped: Take tokens that go on from a state one by one.
    """
    forwards: list[Forward] = []
    steps: list[list[Pass]] = []
    origins: list[int] = []
    for origin, one in enumerate(passes):
        if one.state_in is not None and (stepped or len(one.token_ids) == 1):
            steps.append(_steps(one))
            origins.append(origin)
        else:
            forwards.append(Forward([one], origins=[origin]))
    for column in itertools.zip_longest(*steps):
        rows = [(origin, one) for origin, one in zip(origins, column, strict=True) if one]
        forwards.append(
            Forward([one for _, one in rows], as_rows=True, origins=[origin for origin, _ in rows])
        )
    return forwards


def join(batch: Batch, forwards: Sequence[Forward], outputs: Sequence[StepOutput]) -> StepOutput:
    """Return what the calls gave as the output of the batch."""
    logits: list[list[torch.Tensor]] = [[] for _ in batch.passes]
    scores: list[torch.Tensor | None] = [None for _ in batch.passes]
    finite = [True for _ in batch.passes]
    hidden: list[list[torch.Tensor]] = [[] for _ in batch.passes]
    for forward, output in zip(forwards, outputs, strict=True):
        for index, origin in enumerate(forward.origins):
            logits[origin].append(output.of(index))
            scores[origin] = _sum(scores[origin], output.scores[index])
            finite[origin] &= output.finite is None or output.finite[index]
            part = None if output.hidden is None else output.hidden[index]
            if part is not None:
                hidden[origin].append(part)
    sizes = [sum(map(len, parts)) for parts in logits]
    ends = list(itertools.accumulate(sizes))
    rows = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    return StepOutput(
        torch.cat([part for parts in logits for part in parts]),
        rows,
        scores,
        finite,
        [torch.cat(parts) if parts else None for parts in hidden],
    )


def _steps(one: Pass) -> list[Pass]:
    """Return a pass token by token."""
    last = len(one.token_ids) - 1
    if not last:
        return [one]
    return [
        replace(
            one,
            token_ids=one.token_ids[at : at + 1],
            start=one.start + at,
            logits=LogitRows.NONE if one.logits is LogitRows.LAST and at < last else one.logits,
            positions=None if one.positions is None else one.positions[at : at + 1],
            embeddings=None if one.embeddings is None else one.embeddings[at : at + 1],
            mask=None if one.mask is None else one.mask[..., at : at + 1, : one.start + at + 1],
            scores_queries=int(at > last - one.scores_queries),
            state_in=one.state_in if not at else one.state_out,
        )
        for at in range(last + 1)
    ]


def _sum(before: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    """Add scores of a later token to those of earlier ones, which reach less far."""
    if before is None or more is None:
        return before if more is None else more
    more[..., : before.shape[-1]] += before
    return more

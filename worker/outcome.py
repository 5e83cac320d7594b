"""What a model makes of one step's chunks.

Covers running them and drawing tokens; nothing but the pages' contents changes. Does not cover what
follows from it (`pie.worker.engine`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from pie.wire.messages import PositionLogprobs
from pie.worker.batch import Batch, LogitRows, Pass, StepOutput
from pie.worker.generation import Generation
from pie.worker.logprobs import TokenBytes, position_logprobs
from pie.worker.sampling import draw, finite_rows
from pie.worker.scheduler import Chunk

log = logging.getLogger("pie.worker.outcome")


class StepRunner(Protocol):
    """What is needed of `pie.worker.runner.Runner`."""

    def run(self, batch: Batch) -> StepOutput:
        """Run a batch through the model."""
        ...


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, with its log-probabilities where they were asked for."""

    token: int
    logprobs: PositionLogprobs | None = None


@dataclass(slots=True)
class Outcome:
    """For the chunks of a step, by their place in it."""

    finite: list[bool]
    """Whether the model's output is a number."""
    pure: list[bool]
    """Whether the pass was one whose pages may have keys."""
    output: StepOutput
    """All that the model gave."""
    prompts: dict[int, list[PositionLogprobs]] = field(default_factory=dict)
    """Log-probabilities of the prompt tokens that a chunk is the first to tell of, where wanted."""
    drawn: dict[int, list[Drawn]] = field(default_factory=dict)
    """What was drawn after each chunk that draws: a token for each generation in order."""


def attempt(
    runner: StepRunner,
    chunks: Sequence[tuple[Chunk, Sequence[Generation]]],
    token_bytes: TokenBytes,
    others: Sequence[Pass] = (),
) -> tuple[Outcome | None, str]:
    """Compute a step; where that fails with `others` in it, once more without them.

    Not with a recurrent model, whose states may have been written already, each where it was read.

    Returns what came, None where nothing did, and why the first time failed: `others` are not in
    the outcome then.
    """
    reason = ""
    is_recurrent = any(one.state_out is not None for one in others)
    for passes in (others, ()) if others and not is_recurrent else (others,):
        if not (chunks or passes):
            break
        try:
            return compute(runner, chunks, token_bytes, passes), reason
        except Exception as error:
            log.exception("a step of %d sequences failed", len(chunks) + len(passes))
            reason = reason or f"{type(error).__name__}: {error}"
    return None, reason


@torch.inference_mode()
def compute(
    runner: StepRunner,
    chunks: Sequence[tuple[Chunk, Sequence[Generation]]],
    token_bytes: TokenBytes,
    others: Sequence[Pass] = (),
) -> Outcome:
    """Run chunks through the model and draw tokens.

    Args:
        runner: The model.
        chunks: Each with the generations that draw a token from what comes after it.
        token_bytes: Tokens as bytes.
        others: Passes that run in the same step, behind the chunks.
    """
    passes = [*(_pass(chunk, generations[0]) for chunk, generations in chunks), *others]
    output = runner.run(Batch(passes))
    # Every chunk asks for its last token's logits, drawn from or not: where every layer attends to
    # all tokens, a NaN in any of them reaches the last one.
    rows = [rows.stop - 1 for rows in output.rows]
    logits_finite = finite_rows(output.logits)
    states_finite = output.finite or [True] * len(rows)
    outcome = Outcome(
        [logits_finite[row] and finite for row, finite in zip(rows, states_finite, strict=True)],
        [one.is_pure for one in passes],
        output,
    )
    for i, (chunk, (generation, *_)) in enumerate(chunks):
        if generation.unread and outcome.finite[i]:
            found = _prompt_logprobs(chunk, generation, output, i, token_bytes)
            outcome.prompts[i] = found
    drawing = [
        (i, generation)
        for i, (chunk, generations) in enumerate(chunks)
        if chunk.draws and outcome.finite[i]
        for generation in generations
    ]
    if not drawing:
        return outcome
    logits = output.logits[[rows[i] for i, _ in drawing]]
    tokens = draw(logits, [generation.row for _, generation in drawing])
    told = [
        (at, top)
        for at, (_, generation) in enumerate(drawing)
        if (top := generation.request.sampling.logprobs) is not None
    ]
    logprobs: dict[int, PositionLogprobs] = {}
    if told:
        at_rows = [at for at, _ in told]
        found = position_logprobs(
            logits[at_rows], [tokens[at] for at in at_rows], [top for _, top in told], token_bytes
        )
        logprobs = dict(zip(at_rows, found, strict=True))
    for at, ((i, _), token) in enumerate(zip(drawing, tokens, strict=True)):
        outcome.drawn.setdefault(i, []).append(Drawn(token, logprobs.get(at)))
    return outcome


def _prompt_logprobs(
    chunk: Chunk, generation: Generation, output: StepOutput, index: int, token_bytes: TokenBytes
) -> list[PositionLogprobs]:
    """Return log-probabilities of the prompt tokens that come after a chunk's tokens."""
    wanted, tokens = generation.unread, chunk.sequence.working_set.tokens
    start = chunk.sequence.working_set.computed
    stop = min(start + chunk.tokens + 1, wanted.stop)
    if stop <= wanted.start:
        return []
    # The row of a token tells of the token after it.
    first = output.rows[index].start + wanted.start - start - 1
    rows = output.logits[first : first + stop - wanted.start]
    top = generation.request.prompt_logprobs or 0
    return position_logprobs(
        rows, tokens[wanted.start : stop].tolist(), [top] * len(rows), token_bytes
    )


def _pass(chunk: Chunk, generation: Generation) -> Pass:
    working_set = chunk.sequence.working_set
    start, state = working_set.computed, working_set.state
    return Pass(
        sequence_id=chunk.sequence.number,
        token_ids=working_set.tokens[start : start + chunk.tokens],
        start=start,
        page_ids=working_set.pages,
        logits=LogitRows.ALL if generation.unread else LogitRows.LAST,
        write=working_set.writes,
        state_in=None if state is None else state.source,
        state_out=None if state is None else state.target,
    )

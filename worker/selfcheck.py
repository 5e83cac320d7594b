"""A model's first passes, compared with transformers' own.

Covers the check at every start that a model computes over pages and recurrent states what it
computes without them. It catches what neither its configuration nor a probe shows: an architecture
that uses positions, past tokens or the cache in a way that Pie does not know, or whose code loses
its state where several tokens continue a sequence. Does not cover the kernels, which have a suite
of their own (`pie.worker.attention.conformance`).
"""

from __future__ import annotations

import contextlib
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pie.worker.arena import Arena
from pie.worker.attention import hook
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.errors import UnsupportedModel
from pie.worker.fusing import fused_layers, unfuse, unfused
from pie.worker.runner import Runner

if TYPE_CHECKING:
    from pie.worker.model import Model

log = logging.getLogger("pie.worker.selfcheck")

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""Largest error of a logit over the largest logit. A model that is computed wrongly is off by about
one; bfloat16's rounding stays under 5 % but for models with very large activations."""

_LESS_PRECISE = 2.0
"""Error that fused layers may have over what the same layers have operation by operation."""

_LENGTHS = (21, 14)
_CHUNK = 9


def verify(model: Model) -> Model:
    """Compare short sequences with transformers' own.

    They are chunked, decoded together at different lengths over scattered pages, and continued
    from a snapshot. Returns the model, stepped where it carries its recurrent states on rightly only token by token.

    Raises:
        UnsupportedModel: Pie and transformers disagree.
    """
    draw = torch.Generator().manual_seed(0)
    lengths = [min(length, model.context_tokens) for length in _LENGTHS]
    texts = [torch.randint(model.vocab_size, (n,), generator=draw).tolist() for n in lengths]
    theirs = _without_pages(model, texts)
    with unfused(model.module):
        error = _error(model, texts, theirs)
    if not error <= _TOLERANCE[model.dtype] and model.states:
        stepped = replace(model, stepped=True)
        error = _error(stepped, texts, theirs)
        if error <= _TOLERANCE[model.dtype]:
            log.warning(
                "transformers' code for %s loses its recurrent state where several tokens continue "
                "a sequence: prompts run token by token after their first part, which is slow",
                model.name,
            )
            model = stepped
    if not error <= _TOLERANCE[model.dtype]:
        raise UnsupportedModel(
            f"Pie computes {model.name} otherwise than transformers does "
            f"({_reason(model, error)}), so its pages could not be trusted"
        )
    if fused_layers(model.module):
        own = math.inf
        with contextlib.suppress(UnsupportedModel):
            own = _error(model, texts, theirs)
        if not own <= max(_LESS_PRECISE * error, _TOLERANCE[model.dtype] / 5):
            log.warning(
                "the layers of %s run operation by operation: as one each they were off by %.2g, "
                "where they are by %.2g",
                model.name,
                own,
                error,
            )
            unfuse(model.module)
    return model


def _reason(model: Model, error: float) -> str:
    what = "logits or recurrent states" if model.states else "logits"
    return f"{what} are off by {error:.0%}" if math.isfinite(error) else f"{what} are lost"


def _error(model: Model, texts: list[list[int]], theirs: list[torch.Tensor]) -> float:
    """Return the largest error of a logit over its sequence's largest, or of a state likewise."""
    try:
        trial = _Trial(model, texts)
        own = trial.run()
        states = trial.state_errors()
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{type(model.module).__name__} does not run on Pie's cache: {error}"
        ) from error
    errors = [relative(mine, expected) for mine, expected in zip(own, theirs, strict=True)]
    log.debug("self-check of %s: logits off by %s, states by %s", model.name, errors, states)
    errors += states
    # A NaN compares with nothing.
    return math.inf if any(map(math.isnan, errors)) else max(errors)


def relative(mine: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error over the largest number that was expected."""
    error = (mine.float() - expected.float()).abs().max()
    return float(error / expected.float().abs().max().clamp_min(1e-30))


class _Trial:
    """Sequences over the pages and state slots of a small arena."""

    def __init__(self, model: Model, texts: list[list[int]]) -> None:
        layout = model.layout
        counts = [-(-len(text) // layout.page_tokens) for text in texts]
        self._model = model
        self._texts = texts
        # More than sequences: one for a snapshot that stays behind, and four in all to compare with.
        slots = list(reversed(range(4)))
        self._arena = Arena(layout, sum(counts) + 1, model.device, state_slots=len(slots))
        self._runner = Runner(model, self._arena)
        numbers = list(range(sum(counts), 0, -1))
        self._tables = [numbers[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(texts))]
        self._out = slots[: len(texts)]
        self._spare = slots[-1]
        self._in: list[int | None] = [None for _ in texts]
        self._done = [0 for _ in texts]

    def run(self) -> list[torch.Tensor]:
        """Return all logits of each sequence: the last tokens one at a time, others in chunks."""
        logits: list[list[torch.Tensor]] = [[] for _ in self._texts]
        snapshot: tuple[int, int] | None = None
        while any(map(self._left, range(len(self._texts)))):
            passes = [one for i in range(len(self._texts)) if (one := self._next(i))]
            output = self._runner.run(Batch(passes))
            for index, one in enumerate(passes):
                logits[one.sequence_id].append(output.of(index))
            if self._model.states and snapshot is None:
                snapshot = self._leave_behind(0)
        if snapshot is not None:
            logits[0] = [torch.cat(logits[0])[: snapshot[1]], *self._replay(0, *snapshot)]
        return [torch.cat(rows) for rows in logits]

    def state_errors(self) -> list[float]:
        """Compare the states soon after two tokens went on from others with those of one pass.

        Logits hardly show a lost state where layers add little to what they are given, and later
        states where a model forgets fast. Whether states are used at all is seen bit by bit: without
        them, something must come out otherwise. What is not has an infinite error.
        """
        if not self._model.states or len(self._texts[0]) < _CHUNK + 2:
            return []
        before, after, without, other = range(4)
        # First, because it writes pages that the others are to read as they wrote them.
        self._go(0, _CHUNK + 2, None, other)
        self._go(0, _CHUNK, None, before)
        logits = self._go(_CHUNK, _CHUNK + 2, before, after)
        errors = [relative(state[after], state[other]) for state in self._arena.states]
        for kind in {(ref.is_conv, ref.pair) for ref in self._model.states}:
            self._arena.copy_state(before, without)
            for ref, state in zip(self._model.states, self._arena.states, strict=True):
                if (ref.is_conv, ref.pair) == kind:
                    state[without].zero_()
            same = torch.equal(self._go(_CHUNK, _CHUNK + 2, without, other), logits)
            if same and all(torch.equal(one[after], one[other]) for one in self._arena.states):
                errors.append(math.inf)
        return errors

    def _go(self, start: int, end: int, source: int | None, target: int) -> torch.Tensor:
        """Run tokens of the first text alone; return their logits."""
        one = Pass(
            0,
            self._texts[0][start:end],
            start,
            self._tables[0],
            LogitRows.ALL,
            state_in=source,
            state_out=target,
        )
        return self._runner.run(Batch([one])).logits

    def _left(self, index: int) -> int:
        return len(self._texts[index]) - self._done[index]

    def _next(self, index: int) -> Pass | None:
        left, start = self._left(index), self._done[index]
        count = min(_CHUNK, left - 2) if left > 3 else min(1, left)
        if not count:
            return None
        ids = self._texts[index][start : start + count]
        states = bool(self._model.states)
        one = Pass(
            index,
            ids,
            start,
            self._tables[index],
            LogitRows.ALL,
            state_in=self._in[index],
            state_out=self._out[index] if states else None,
        )
        self._done[index] = one.end
        self._in[index] = one.state_out
        return one

    def _leave_behind(self, index: int) -> tuple[int, int]:
        """Let a sequence's states stay as they are; return slot and tokens."""
        slot, self._out[index] = self._out[index], self._spare
        return slot, self._done[index]

    def _replay(self, index: int, slot: int, tokens: int) -> list[torch.Tensor]:
        """Go on from a snapshot, as a later prompt does, beside nothing else."""
        self._in[index], self._done[index] = slot, tokens
        rows: list[torch.Tensor] = []
        while one := self._next(index):
            rows.append(self._runner.run(Batch([one])).of(0))
        return rows


def _without_pages(model: Model, texts: list[list[int]]) -> list[torch.Tensor]:
    model.module.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return [
                model.module(input_ids=torch.tensor([text], device=model.device), use_cache=False)
                .logits[0]
                .float()
                for text in texts
            ]
    finally:
        model.module.set_attn_implementation(hook.NAME)

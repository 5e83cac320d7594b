"""One sequence's part of a pass through the model.

Covers what is run, what it attends to and what is wanted of it, and what came. Does not cover when it
runs (`pie.inferlet.pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pie.inferlet.connection import u32, whole
from pie.inferlet.errors import BadCallError, type_told
from pie.inferlet.samplers import Sampler, sampler_told
from pie.inferlet.slot_steps import SlotStep
from pie.inferlet.working_set import WorkingSet
from pie.wire.frames import Buffer
from pie.wire.programs import PassInput, PassPart, Rows

Which = Literal["last", "all"]
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StateGeometry:
    """Which slots of a working set a pass writes and reads.

    Attributes:
        working_set: The sequence.
        write: The first slot to write; by default the one after the last. A slot in the writable
            buffer may be written again; what followed it is forgotten.
        read: The slots before the pass that it may attend to; by default all live ones.
    """

    working_set: WorkingSet
    write: int | None = None
    read: Sequence[int] | NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class PassResult:
    """What a pass gave; what was not asked for is None or empty."""

    first_slot: int
    """The slot of its first token."""
    token: int | None = None
    """The token that was drawn."""
    logits: Floats | None = None
    """`[rows, vocab_size]`"""
    hidden: Floats | None = None
    """`[rows, hidden_size]`"""
    scores: Floats | None = None
    """`[layers, query_heads, slots]`: the share of attention that the last tokens paid to each slot, the mean
    over those tokens. Sums to one over slots; dropped and masked slots have 0."""
    logprobs: Floats | None = None
    """`[tokens]`, natural logarithms."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest next tokens with their log-probabilities, likeliest first."""


class ForwardPass:
    """Tokens to run on a working set. Methods return the pass itself, so that they can be chained.

    Args:
        state: Where its tokens go and what they attend to.

    Raises:
        BadCallError: It is neither.
    """

    def __init__(self, state: StateGeometry | WorkingSet) -> None:
        geometry = state if isinstance(state, StateGeometry) else StateGeometry(state)
        if not isinstance(geometry.working_set, WorkingSet):
            raise BadCallError(
                "a pass runs on a working set, such as `ctx.working_set`, or on a StateGeometry of one, "
                f"not on {type_told(geometry.working_set)}"
            )
        self.working_set = geometry.working_set
        self._write = geometry.write
        self._read: NDArray[np.int64] | None = None
        if geometry.read is not None:
            self._read = whole(geometry.read, "slots")
        self._tokens: list[int] = []
        self._embeddings: Floats | None = None
        self._positions: NDArray[np.int64] | None = None
        self._mask: NDArray[np.bool_] | None = None
        self._targets: list[int] = []
        self._top = 0
        self._logits = self._hidden = Rows.NONE
        self._scores = 0
        self._sampler: Sampler | None = None
        self._drawn = 0

    def input(
        self,
        tokens: Iterable[int] | NDArray[np.floating[Any]],
        positions: Iterable[int] | None = None,
    ) -> ForwardPass:
        """Run tokens, at `positions`; by default those after the last.

        Args:
            tokens: Ids. Or an array `[tokens, hidden_size]` of what goes into the first layer instead of
                tokens' embeddings: from then on the set's pages are its own, no other request finds them.
            positions: One for each.
        """
        if isinstance(tokens, np.ndarray) and tokens.ndim > 1:
            self._embeddings = np.ascontiguousarray(tokens, "<f4")
            self._tokens = [0] * len(tokens)
        else:
            self._embeddings = None
            self._tokens = whole(tokens, "tokens").tolist()
        if positions is not None:
            self._positions = whole(positions, "positions")
        return self

    def mask(self, allowed: ArrayLike | Iterable[int]) -> ForwardPass:
        """Narrow what the tokens attend to; later slots are never attended to.

        Args:
            allowed: Slots before the pass, as numbers: every token attends to those and to the pass's
                own. Or booleans `[tokens, slots]`, or `[layers, heads, tokens, slots]` with 1 for all
                layers or heads, where `slots` counts all from 0 to the pass's last.
        """
        try:
            array = allowed if isinstance(allowed, np.ndarray) else np.asarray(list(allowed))  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadCallError(
                f"a mask is slot numbers or an array of booleans, not {type_told(allowed)}"
            ) from error
        if array.dtype == np.bool_:
            self._mask = array
        elif array.ndim > 1:
            raise BadCallError(f"a mask of {array.ndim} axes holds booleans, not {array.dtype}")
        else:
            self._read = whole(array, "slots")
        return self

    def scores(self, window: int = 1) -> ForwardPass:
        """Ask for the attention that the last `window` tokens pay to each slot."""
        self._scores = window
        return self

    def logits(self, rows: Which = "last") -> ForwardPass:
        """Ask for logits, of the last token or of all."""
        self._logits = _rows("logits", rows)
        return self

    def hidden(self, rows: Which = "last") -> ForwardPass:
        """Ask for the last hidden state, of the last token or of all."""
        self._hidden = _rows("hidden", rows)
        return self

    def logprobs(self, tokens: Iterable[int] = (), *, top: int = 0) -> ForwardPass:
        """Ask for log-probabilities.

        Args:
            tokens: One to follow each of the last inputs: the log-probability of each is wanted.
            top: So many of the likeliest tokens to follow the last input.
        """
        self._targets, self._top = whole(tokens, "tokens").tolist(), top
        return self

    def sample(self, sampler: Sampler, drawn: int = 0) -> ForwardPass:
        """Draw the next token; `drawn` is how many were before, for a seeded draw.

        Raises:
            BadCallError: It is no `Sampler`.
        """
        if not isinstance(sampler, Sampler):
            raise BadCallError(
                f"sample takes a Sampler, such as `greedy()`, not {sampler_told(sampler)}"
            )
        self._sampler, self._drawn = sampler, drawn
        return self

    def message(self) -> tuple[PassInput, list[Buffer]]:
        """Return what is sent: for `Pipeline`.

        Raises:
            BadCallError: There is nothing to run, or the mask has another shape.
        """
        if not self._tokens:
            raise BadCallError("a forward pass needs input(tokens) with at least one token")
        frames: list[Buffer] = [u32(self._tokens)]
        if self._embeddings is not None:
            frames.append(self._embeddings.tobytes())
        if self._positions is not None:
            frames.append(u32(self._positions))
        if self._read is not None:
            frames.append(u32(self._read))
        shape = self._mask_shape()
        if self._mask is not None:
            frames.append(np.packbits(self._mask).tobytes())
        if self._targets:
            frames.append(u32(self._targets))
        one = PassInput(
            set=self.working_set.number,
            has_embeddings=self._embeddings is not None,
            has_positions=self._positions is not None,
            write=self._write,
            has_read=self._read is not None,
            mask=shape,
            logits=self._logits,
            hidden=self._hidden,
            scores=self._scores,
            targets=len(self._targets),
            top=self._top,
            sampling=None if self._sampler is None else self._sampler.declared(),
            draw=self._drawn,
        )
        return one, frames

    def begin(self) -> SlotStep:
        """Note what it writes: for `Pipeline`."""
        return self.working_set.write(len(self._tokens), self._write)

    def result(self, part: PassPart, frames: list[bytes]) -> PassResult:
        """Take what was sent back from the front of `frames`: for `Pipeline`."""

        def floats(shape: tuple[int, ...] | None) -> Floats | None:
            if shape is None:
                return None
            return np.frombuffer(frames.pop(0), "<f4").reshape(shape)

        logits, hidden, scores = floats(part.logits), floats(part.hidden), floats(part.scores)
        logprobs = floats((part.targets,)) if part.targets else None
        top: tuple[tuple[int, float], ...] = ()
        if part.top:
            ids = np.frombuffer(frames.pop(0), "<u4").tolist()
            values = np.frombuffer(frames.pop(0), "<f4").tolist()
            top = tuple(zip(ids, values, strict=True))
        return PassResult(part.first_slot, part.token, logits, hidden, scores, logprobs, top)

    def _mask_shape(self) -> tuple[int, int, int, int] | None:
        if self._mask is None:
            return None
        if self._mask.ndim not in (2, 4):
            raise BadCallError(
                f"a mask has 2 or 4 axes, this one {self._mask.ndim}: [tokens, slots] or "
                "[layers, heads, tokens, slots]"
            )
        shape = (1, 1, 1, 1, *self._mask.shape)[-4:]
        return (shape[0], shape[1], shape[2], shape[3])


def _rows(method: str, rows: Which) -> Rows:
    if rows not in ("last", "all"):
        raise BadCallError(f'{method} takes "last" or "all", not {rows!r:.100}')
    return Rows(rows)

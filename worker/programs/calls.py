"""A program's pass as it comes off the pipe, checked against what the model is.

Covers turning frames into arrays and refusing what cannot be meant. Does not cover what depends on
the working set (`pie.worker.programs.run`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pie.wire.errors import RefusedError
from pie.wire.messages import Sampling
from pie.wire.programs import PassInput, Rows, Trouble
from pie.worker.intake import check_sampling
from pie.worker.programs.cells import Bools, Ints
from pie.worker.programs.trouble import CallError, recurrent

MOST_RESULT_BYTES = 64 << 20
_MOST_MASK_ELEMENTS = 1 << 24
"""Of all masks of a pass together: it takes the step thread, which is everybody's, some 20 ms."""
_MOST_TOP = 4096
MOST_TEXT_CHARS = 4 << 20
"""Of a text or a conversation that a program has turned into tokens."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What checks and masks need to know of a model."""

    vocab_size: int
    context_tokens: int
    hidden_size: int
    query_heads: int
    """Most of any layer."""
    kv_heads: int
    windows: tuple[int | None, ...]
    """Of each layer with attention."""
    is_recurrent: bool

    @property
    def layers(self) -> int:
        """Layers with attention."""
        return len(self.windows)


@dataclass(frozen=True, slots=True)
class Mask:
    """What a pass may attend to, packed as long as it waits: eight times as much is not held for each."""

    shape: tuple[int, int, int, int]
    """Layers or 1, query heads or 1, tokens, slots."""
    bits: bytes

    def unpacked(self) -> Bools:
        """Return it as an array of `shape`."""
        packed: NDArray[np.uint8] = np.frombuffer(self.bits, np.uint8)
        return np.unpackbits(packed, count=math.prod(self.shape)).view(np.bool_).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class PassCall:
    """One sequence's part of a pass."""

    set: int
    tokens: list[int]
    positions: Ints | None
    write: int | None
    read: Ints | None
    mask: Mask | None
    wants: PassInput
    targets: Ints
    embeddings: NDArray[np.float32] | None = None
    """`[tokens, hidden_size]`"""


def read_inputs(
    inputs: Sequence[PassInput], frames: Sequence[bytes], shape: ModelShape
) -> list[PassCall]:
    """Return the parts of a pass.

    Raises:
        CallError: Says what is wrong with which of them.
    """
    if not inputs:
        raise bad("a pass has at least one sequence")
    if len({one.set for one in inputs}) < len(inputs):
        raise bad("a pass has two inputs for the same working set: fork it, or run two passes")
    masked = sum(math.prod(one.mask) for one in inputs if one.mask is not None)
    if masked > _MOST_MASK_ELEMENTS:
        raise bad(
            f"masks of {masked} elements, of at most {_MOST_MASK_ELEMENTS}: run fewer tokens in a pass, or "
            "name the slots that all of them attend to"
        )
    left = list(frames)

    def ints() -> Ints:
        if not left or len(left[0]) % 4:
            raise bad("a pass came with other frames than it announces")
        if len(left[0]) > 4 * shape.context_tokens:
            raise CallError(
                Trouble.CONTEXT_LENGTH,
                f"a pass with {len(left[0]) // 4} tokens, positions or slots, and the model's context is "
                f"{shape.context_tokens}",
            )
        return np.frombuffer(left.pop(0), "<u4").astype(np.int64)

    calls = []
    for one in inputs:
        tokens = ints()
        embeddings = None
        if one.has_embeddings:
            embeddings = _embeddings(left.pop(0) if left else b"", len(tokens), shape)
        positions = ints() if one.has_positions else None
        read = ints() if one.has_read else None
        mask = None
        if one.mask is not None:
            mask = _mask(one.mask, left.pop(0) if left else b"", shape)
        targets = ints() if one.targets else np.empty(0, np.int64)
        _check(one, tokens, positions, targets, shape)
        calls.append(
            PassCall(
                one.set,
                tokens.tolist(),
                positions,
                one.write,
                read,
                mask,
                one,
                targets,
                embeddings,
            )
        )
    if left:
        raise bad("a pass came with other frames than it announces")
    if sum(_result_bytes(call, shape) for call in calls) > MOST_RESULT_BYTES:
        raise bad(
            f"the results of this pass would take more than {MOST_RESULT_BYTES >> 20} MiB: ask for "
            "the last token's logits, or run fewer tokens in a pass"
        )
    return calls


def check_tokens(tokens: Ints, shape: ModelShape) -> None:
    """Refuse tokens that the model does not know, and none at all.

    Raises:
        CallError: Says which.
    """
    if not len(tokens):
        raise bad("a pass needs at least one token")
    if len(tokens) > shape.context_tokens:
        raise CallError(
            Trouble.CONTEXT_LENGTH,
            f"more tokens than the model's context of {shape.context_tokens} holds",
        )
    if int(tokens.max()) >= shape.vocab_size:
        raise bad(f"token {int(tokens.max())} is not below {shape.vocab_size}")


def read_ints(frames: Sequence[bytes], most: int | None = None) -> Ints:
    """Return the numbers in the one frame of a call, the first `most` of them.

    Raises:
        CallError: There is another number of frames, or it holds no 32-bit numbers.
    """
    if len(frames) != 1 or len(frames[0]) % 4:
        raise bad("the call needs one frame of 32-bit numbers")
    return np.frombuffer(frames[0], "<u4")[:most].astype(np.int64)


def check_drawing(sampling: Sampling) -> None:
    """Refuse what no token can be drawn by.

    Raises:
        CallError: Names what is wrong.
    """
    try:
        check_sampling(sampling)
    except RefusedError as error:
        raise bad(error.message) from error


def bad(message: str) -> CallError:
    """Return the error of a call that nobody can carry out."""
    return CallError(Trouble.BAD_CALL, message)


def _check(
    one: PassInput, tokens: Ints, positions: Ints | None, targets: Ints, shape: ModelShape
) -> None:
    check_tokens(tokens, shape)
    if one.sampling is not None:
        check_drawing(one.sampling)
    if one.draw < 0 or (one.write is not None and one.write < 0):
        raise bad("slots and counts are not negative")
    if positions is not None:
        if len(positions) != len(tokens):
            raise bad(f"there are {len(positions)} positions for {len(tokens)} tokens")
        if int(positions.max()) >= shape.context_tokens:
            raise CallError(
                Trouble.CONTEXT_LENGTH,
                f"position {int(positions.max())} is not below the model's {shape.context_tokens}",
            )
    if len(targets) != one.targets or one.targets > len(tokens):
        raise bad(f"log-probabilities of {len(targets)} tokens after {len(tokens)} inputs")
    if len(targets) and int(targets.max()) >= shape.vocab_size:
        raise bad(f"token {int(targets.max())} is not below {shape.vocab_size}")
    if not 0 <= one.top <= min(_MOST_TOP, shape.vocab_size):
        raise bad(f"the likeliest {one.top} tokens: at most {_MOST_TOP} can be asked for")
    if not 0 <= one.scores <= len(tokens):
        raise bad(f"scores of the last {one.scores} of {len(tokens)} tokens")
    if shape.is_recurrent and (one.mask is not None or one.has_read):
        raise recurrent(f"a mask would hide nothing from them ({may_ask(shape)})")
    if one.scores and not shape.layers:
        raise recurrent(f"there is no attention to give scores of ({may_ask(shape)})")


def may_ask(shape: ModelShape) -> str:
    """Say what programs may do on a model with recurrent layers besides running tokens."""
    scores = "scores of its layers with attention, " if shape.layers else ""
    return f"what may be had of this model: {scores}logits, hidden states, forks, seal, park"


def _mask(shape: tuple[int, int, int, int], bits: bytes, model: ModelShape) -> Mask:
    count = math.prod(shape)
    if min(shape) < 1 or len(bits) != -(-count // 8):
        raise bad(f"a mask of shape {shape} came with {len(bits)} bytes")
    if shape[0] not in (1, model.layers) or shape[1] not in (1, model.query_heads):
        raise bad(
            f"a mask for {shape[0]} layers and {shape[1]} heads: the model has {model.layers} layers "
            f"with attention and {model.query_heads} query heads"
        )
    return Mask(shape, bits)


def _embeddings(data: bytes, tokens: int, model: ModelShape) -> NDArray[np.float32]:
    if len(data) != 4 * tokens * model.hidden_size:
        raise bad(
            f"embeddings of {tokens} tokens are [{tokens}, {model.hidden_size}] for this model, and came "
            f"with {len(data)} bytes"
        )
    found = np.frombuffer(data, "<f4").reshape(tokens, model.hidden_size)
    if not np.isfinite(found).all():
        raise bad("embeddings hold something that is not a number")
    return found


def _result_bytes(call: PassCall, shape: ModelShape) -> int:
    rows = {Rows.NONE: 0, Rows.LAST: 1, Rows.ALL: len(call.tokens)}
    wants = call.wants
    elements = rows[wants.logits] * shape.vocab_size + rows[wants.hidden] * shape.hidden_size
    return 4 * (elements + len(call.targets) + 2 * wants.top)

"""What is told of a prompt's own tokens, in vLLM's shape (`prompt_logprobs`).

Covers shaping. Does not cover `echo`, which has OpenAI's (`pie.router.api.completions`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pie.router.mailbox import Piece
from pie.wire.messages import PositionLogprobs, TokenLogprob

LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot spell."""


class PromptLogprob(msgspec.Struct):
    """One token at a position of the prompt."""

    logprob: float
    rank: int | None
    """1 for the likeliest; none for a token of the prompt that is not among those that were asked for."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, at each position; None at the first, which nothing comes before."""


def prompt_logprobs(
    positions: Sequence[PositionLogprobs], most: int | None = None
) -> PromptLogprobs:
    """Return each position's token of the prompt and its `most` likeliest ones, or all that were told."""
    return [None, *(_position(position, most) for position in positions)]


def of_prompt(pieces: Sequence[Piece]) -> Sequence[PositionLogprobs] | None:
    """Return what was told of the prompt that pieces share; None where it was not asked for."""
    told = (piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None)
    return next(told, None)


def _position(position: PositionLogprobs, most: int | None) -> dict[str, PromptLogprob]:
    found = {
        str(top.token_id): _one(top, rank) for rank, top in enumerate(position.top[:most], start=1)
    }
    chosen = position.chosen
    found.setdefault(str(chosen.token_id), _one(chosen, None))
    return found


def _one(token: TokenLogprob, rank: int | None) -> PromptLogprob:
    text = token.token.decode("utf-8", errors="replace")
    return PromptLogprob(max(token.logprob, LOWEST_LOGPROB), rank, text)

"""`best_of`: which of a prompt's sequences are its answer.

Covers ranking by mean log-probability of a token, as OpenAI's completions do. Does not cover making
the sequences (`pie.router.dispatch`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pie.router.mailbox import Piece


@dataclass(frozen=True, slots=True)
class Likeliest:
    """Keeps the likeliest of each prompt's sequences."""

    kept: int
    """So many of each prompt's."""
    shows_logprobs: bool
    """Whether the client asked for the log-probabilities that this needs."""

    def of(self, pieces: Sequence[Piece], *, choices: int) -> list[Piece]:
        """Return what is kept, the best first, numbered anew.

        Args:
            pieces: Whole answers with log-probabilities, `choices` next to each other for each
                prompt.
            choices: Sequences of each prompt.
        """
        kept: list[Piece] = []
        for start in range(0, len(pieces), choices):
            group = pieces[start : start + choices]
            kept += sorted(group, key=_mean_logprob, reverse=True)[: self.kept]
        for index, piece in enumerate(kept):
            piece.index = index
            if not self.shows_logprobs:
                piece.logprobs = []
        return kept


def _mean_logprob(piece: Piece) -> float:
    """Return the mean over its tokens; an answer without any comes last."""
    if not piece.logprobs:
        return -math.inf
    return sum(one.chosen.logprob for one in piece.logprobs) / len(piece.logprobs)

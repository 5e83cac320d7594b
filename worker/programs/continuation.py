"""Tokens that the engine draws one after another for a program.

Covers text, stop strings, limits and the end. Does not cover drawing them
(`pie.worker.programs.lane`).
"""

from __future__ import annotations

from collections import Counter

from pie.tokens.detokenizer import Detokenizer
from pie.tokens.stops import StopMatcher
from pie.wire.programs import Drawn, GenerateTokens
from pie.worker.draws import fresh_seed
from pie.worker.generation import Vocabulary
from pie.worker.grammar import Constraint
from pie.worker.sampling import SamplingRow


class Continuation:
    """One `GenerateTokens` that is being carried out.

    Args:
        request: What was asked.
        prompt: The tokens before the first one drawn, as far as text depends on them.
        vocabulary: Tokenizer and end tokens.
        room: Tokens that still fit into the context.
        constraint: What the answer must match.
    """

    def __init__(
        self,
        request: GenerateTokens,
        prompt: list[int],
        vocabulary: Vocabulary,
        room: int,
        constraint: Constraint | None = None,
    ) -> None:
        seed = request.sampling.seed
        self.row = SamplingRow(
            request.sampling,
            fresh_seed() if seed is None else seed,
            0,
            Counter(),
            constraint=constraint,
        )
        self.is_cancelled = False
        self._call = request.call
        self._left = min(request.max_tokens, room)
        self._ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos or constraint is not None:
            self._ends |= vocabulary.eos_token_ids
        self._detokenizer = Detokenizer(vocabulary.tokenizer, prompt)
        self._stops = StopMatcher(request.stop)

    def push(self, token: int) -> Drawn:
        """Take the next token and return what to tell the program.

        Raises:
            GrammarFailedError: The answer cannot go on as its grammar wants.
        """
        if self.row.constraint is not None and token not in self._ends:
            self.row.constraint.take((token,))
        self.row.position += 1
        self.row.counts[token] += 1
        self._left -= 1
        finish = text = ""
        if token in self._ends:
            finish = "stop"
        else:
            text = self._stops.push(self._detokenizer.push((token,))).text
            if self._stops.matched is not None:
                finish = "stop"
            elif self.is_cancelled:
                finish = "cancelled"
            elif self._left <= 0:
                finish = "length"
        if finish:
            text += self._stops.push(self._detokenizer.flush()).text + self._stops.flush()
        return Drawn(self._call, (token,), text, finish)

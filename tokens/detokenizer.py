"""Text of tokens that arrive one by one.

Covers generated tokens to text in pieces that never hold half a character, also when a stream
goes on at another worker. Does not cover stop strings (`pie.tokens.stops`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pie.tokens.stages import Stage
from pie.tokens.tokenizer import Tokenizer

_CONTEXT_BYTES = 4
"""An unfinished character at a prompt's end, and the text before it, lie within the last four."""


class Detokenizer:
    """Turns generated ids into text as they come.

    All pieces together, `flush` included, are the end of the whole decoded sequence: what
    `Tokenizer.decode(prompt_ids + generated_ids)` has beyond the prompt's complete characters,
    special tokens left out. The time for a token does not depend on how many came before.

    To go on with a stream elsewhere: make one with the same `prompt_ids`, push the ids that were
    generated so far, and drop (or give to the stop matcher) the text that comes back.

    Args:
        tokenizer: The model's.
        prompt_ids: What comes before the first generated id. The last few are enough, as long
            as one of them is not special; they are read from the end and only as far as needed.
        shows_special: Whether special tokens are part of the text.
    """

    __slots__ = ("_hidden_ids", "_stages", "_token")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        *,
        shows_special: bool = False,
    ) -> None:
        self._token = tokenizer.token
        self._hidden_ids = frozenset[int]() if shows_special else tokenizer.special_ids
        self._stages: list[Stage] = tokenizer.plan.open()
        if prompt_ids:
            self.push(_context(tokenizer, prompt_ids))
            self._end(settle=True)

    def push(self, ids: Iterable[int]) -> str:
        """Take ids and return the text that no later id can change; it may be empty."""
        text = []
        for id_ in ids:
            if id_ in self._hidden_ids:
                continue
            token = self._token(id_)
            if token is None:
                continue
            pieces = [token]
            for stage in self._stages:
                pieces = _through(stage, pieces)
            text += pieces
        return "".join(text)

    def flush(self) -> str:
        """Return what was held back: no more ids come. Half a character becomes U+FFFD."""
        return self._end(settle=False)

    def _end(self, *, settle: bool) -> str:
        """End every step in order; what one gives away goes through the next ones."""
        pieces: list[str] = []
        for stage in self._stages:
            pieces = _through(stage, pieces)
            pieces += stage.settle() if settle else stage.flush()
        return "".join(pieces)


def _through(stage: Stage, pieces: list[str]) -> list[str]:
    """Return what a step makes of some pieces."""
    if len(pieces) == 1:
        return stage.push(pieces[0])
    return [made for piece in pieces for made in stage.push(piece)]


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """Return the last ids of a prompt that decide what state a stream is in after it."""
    tail: list[int] = []
    size = 0
    for id_ in reversed(prompt_ids):
        if id_ not in tokenizer.special_ids:
            tail.append(id_)
            size += len(tokenizer.token_bytes(id_))
            if size >= _CONTEXT_BYTES:
                break
    return tail[::-1]

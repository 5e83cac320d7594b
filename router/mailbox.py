"""What sequences have made and their client has not been sent yet.

Covers merging deltas, so that a slow client costs one growing text and no queue, and waking whoever
writes to the client. Does not cover sockets (`pie.router.exchange`) or shapes (`pie.router.api`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from pie.router.errors import ApiError
from pie.wire.messages import FinishReason, PositionLogprobs, TokenDelta


@dataclass(slots=True)
class Piece:
    """What one sequence has made since it was last asked."""

    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: Sequence[PositionLogprobs] | None = None
    """Of the prompt, where they were asked for: with the first piece."""
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        """All of its text."""
        return self.texts[0] if len(self.texts) == 1 else "".join(self.texts)

    def add(self, delta: TokenDelta) -> None:
        """Take in one more delta."""
        if delta.text:
            self.texts.append(delta.text)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.logprobs:
            self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish = delta.finish_reason
            if self.logprobs and delta.finish_reason is FinishReason.STOP and not delta.stop_string:
                # The token that ends an answer is no part of it, and neither is its probability.
                self.logprobs.pop()


class Mailbox:
    """Pieces of all sequences of one HTTP request.

    Args:
        sequences: How many there are; each ends once, with a finish reason or an error.
        streaming: Whether `take` returns before everything has ended.
    """

    def __init__(self, sequences: int, *, streaming: bool) -> None:
        self._streaming = streaming
        self._open = sequences
        self._pieces: dict[int, Piece] = {}
        self._error: ApiError | None = None
        self._hung_up = False
        self._wake = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether every sequence has ended."""
        return self._open == 0

    @property
    def hung_up(self) -> bool:
        """Whether the client has gone."""
        return self._hung_up

    def add(self, index: int, delta: TokenDelta) -> None:
        """Take in what a sequence made."""
        piece = self._pieces.get(index)
        if piece is None:
            piece = self._pieces[index] = Piece(index)
        piece.add(delta)
        if delta.finish_reason is not None:
            self._open -= 1
        if self._streaming or not self._open:
            self._wake.set()

    def fail(self, error: ApiError) -> None:
        """Note that a sequence cannot go on: the first error ends the request."""
        if self._error is None:
            self._error = error
        self._wake.set()

    def hang_up(self) -> None:
        """Note that the client has gone."""
        self._hung_up = True
        self._wake.set()

    async def take(self) -> list[Piece]:
        """Wait for the next pieces and return them; nothing once the client has gone.

        Not streaming, this returns when all sequences have ended.

        Raises:
            ApiError: A sequence cannot go on. A stream is given what was made before that first.
        """
        while not self._hung_up:
            if self._pieces and (self._streaming or not self._open):
                pieces = list(self._pieces.values())
                self._pieces.clear()
                return pieces
            if self._error is not None:
                raise self._error
            self._wake.clear()
            await self._wake.wait()
        return []

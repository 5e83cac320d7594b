"""What all answers share: token counts and why an answer ended, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from pie.router.mailbox import Piece
from pie.wire.messages import FinishReason


class PromptTokensDetails(msgspec.Struct):
    """What became of the prompt's tokens."""

    cached_tokens: int = 0
    """Tokens that were not computed, because their pages were held."""


class Usage(msgspec.Struct):
    """Tokens read and made."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(*, prompt: int, completion: int, cached: int) -> Usage:
    """Return the counts of one request."""
    return Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))


def finish_text(reason: FinishReason | None) -> Literal["stop", "length"] | None:
    """Return OpenAI's word for why an answer ended."""
    if reason is None:
        return None
    return "length" if reason is FinishReason.LENGTH else "stop"


class Shaper(Protocol):
    """Gives pieces the shape of an endpoint's answers."""

    def answer(self, pieces: Sequence[Piece], counts: Usage) -> msgspec.Struct:
        """Return the whole answer."""
        ...

    def opening(self, choices: int) -> Sequence[msgspec.Struct]:
        """Return the events before the first text."""
        ...

    def events(self, piece: Piece) -> Sequence[msgspec.Struct]:
        """Return the events for what a sequence made; there may be none yet."""
        ...

    def closing(self, counts: Usage) -> msgspec.Struct:
        """Return the event that has the usage."""
        ...

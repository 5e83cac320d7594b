"""Token counts of an answer, in OpenAI's shape."""

from __future__ import annotations

import msgspec


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

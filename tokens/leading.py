"""The tokens that all prompts begin with which begin with a text or a system message.

Covers finding them. Does not cover whose texts those are, or the pages that the tokens fill.
"""

from __future__ import annotations

from itertools import takewhile

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer

_ASKED = ("a", "Tell me.")
"""Two questions: what conversations that ask them have in common at their start."""


def leading_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text as a completion's prompt begins with it.

    Raises:
        TokensError: It is no text.
    """
    return tokenizer.encode(text, add_special_tokens=True)


def system_tokens(tokenizer: Tokenizer, template: ChatTemplate, system: str) -> list[int]:
    """Return the tokens that conversations with a system message have in common.

    Raises:
        TokensError: It is no text, or the template does not take it.
    """
    first, second = (
        tokenizer.encode(
            template.render(
                [{"role": "system", "content": system}, {"role": "user", "content": asked}]
            )
        )
        for asked in _ASKED
    )
    return [
        one
        for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    ]

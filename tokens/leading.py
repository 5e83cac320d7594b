"""The tokens that all prompts begin with which begin with a text or a system message.

Covers finding them. Does not cover whose texts those are, or the pages that the tokens fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from pie.tokens.errors import TemplateError
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer

_ASKED = ("a", "Tell me.")
"""Two questions: what conversations that ask them have in common at their start."""


class Beginning(Protocol):
    """What prompts begin with, as one of these; as none of them where its tokens cannot be known."""

    @property
    def text(self) -> str | None:
        """As a completion's prompt has it."""

    @property
    def system(self) -> str | None:
        """The system message of a conversation."""

    @property
    def tokens(self) -> Sequence[int] | None:
        """The tokens themselves."""


def tokens_of(
    beginning: Beginning, tokenizer: Tokenizer, template: Callable[[], ChatTemplate | None]
) -> Sequence[int] | None:
    """Return the tokens of a beginning; None where it is given as something else.

    Args:
        beginning: What prompts begin with.
        tokenizer: The model's.
        template: Asked for the model's chat template where there is a system message.

    Raises:
        TokensError: It is no text, or the template does not take it, or is none.
    """
    if beginning.text is not None:
        return leading_tokens(tokenizer, beginning.text)
    if beginning.system is not None:
        if (found := template()) is None:
            raise TemplateError("there is no chat template for a system message")
        return system_tokens(tokenizer, found, beginning.system)
    return beginning.tokens


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

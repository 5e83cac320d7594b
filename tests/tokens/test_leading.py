"""What prompts begin with, in tokens, whichever way it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import pytest

from pie.tokens.errors import TemplateError
from pie.tokens.leading import tokens_of
from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from tests.tokens.conftest import Pair


@dataclass(frozen=True)
class Given:
    text: str | None = None
    system: str | None = None
    tokens: Sequence[int] | None = None


def unasked() -> NoReturn:
    raise AssertionError("asked for the template")


@pytest.fixture
def tokenizer(pairs: Callable[[str], Pair]) -> Tokenizer:
    return pairs("byte_level").ours


def test_a_beginning_has_the_tokens_of_what_it_is_given_as(tokenizer: Tokenizer) -> None:
    words = tokenizer.encode("Ahoy there", add_special_tokens=True)
    assert tokens_of(Given(text="Ahoy there"), tokenizer, unasked) == words
    assert tokens_of(Given(tokens=(5, 6)), tokenizer, unasked) == (5, 6)
    assert tokens_of(Given(), tokenizer, unasked) is None
    template = ChatTemplate({"default": "{% for m in messages %}{{ m.content }} {% endfor %}"}, {})
    told = tokens_of(Given(system="Ahoy there"), tokenizer, lambda: template)
    assert told is not None
    assert list(told) == tokenizer.encode("Ahoy there ")[: len(told)]


def test_a_system_message_without_a_template_is_told(tokenizer: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="no chat template"):
        tokens_of(Given(system="Ahoy"), tokenizer, lambda: None)

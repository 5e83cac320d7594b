"""What goes wrong between text and tokens.

    TokensError
    ├── TokenizerError          a model's folder lacks a tokenizer, or has one that does not work here
    ├── TextError               a text that no tokenizer takes
    └── TemplateError           a chat template that does not compile or does not render
        ├── TemplateRefusedError    the template's own words about a conversation it does not take
        └── TemplateLimitError      a rendering that ran or grew past its limit

Every message is one sentence for a person. Errors of `tokenizers` and `jinja2` do not leave this package.
"""

from __future__ import annotations


class TokensError(Exception):
    """The root of this package's errors."""


class TokenizerError(TokensError):
    """A model's folder lacks a tokenizer, or has one that does not work here."""


class TextError(TokensError):
    """A text that no tokenizer takes: it holds half of a surrogate pair."""


class TemplateError(TokensError):
    """A chat template does not compile, or does not render this conversation."""


class TemplateRefusedError(TemplateError):
    """The template's own words (`raise_exception`) about a conversation that it does not take."""


class TemplateLimitError(TemplateError):
    """A rendering ran or grew past its limit."""

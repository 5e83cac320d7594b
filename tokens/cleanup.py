"""Replacing short strings in text, also where the text arrives in pieces.

Covers one replacement, and `clean_up_tokenization_spaces`, by which some tokenizers take out the
spaces before punctuation. Does not cover which tokenizers do it (`pie.tokens.tokenizer`).
"""

from __future__ import annotations

_REPLACED = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""In the order of transformers' `clean_up_tokenization`, each over the result of the one before."""


def clean_up(text: str) -> str:
    """Return `text` without the spaces that do not belong to it."""
    for old, new in _REPLACED:
        text = text.replace(old, new)
    return text


class ReplaceText:
    """`str.replace` in a text that arrives in pieces.

    Holds back the longest end of the text that may begin another match.
    """

    __slots__ = ("_held", "_new", "_old")

    def __init__(self, old: str, new: str) -> None:
        self._old = old
        self._new = new
        self._held = ""

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        *done, rest = (self._held + piece).split(self._old)
        cut = len(rest)
        for size in range(min(len(self._old) - 1, len(rest)), 0, -1):
            if rest.endswith(self._old[:size]):
                cut -= size
                break
        self._held = rest[cut:]
        return [self._new.join([*done, rest[:cut]])]

    def flush(self) -> list[str]:
        """Return what was held back: the text has ended."""
        held, self._held = self._held, ""
        return [held] if held else []

    def settle(self) -> list[str]:
        """Return what was held back: the prompt's text has ended."""
        return self.flush()


class CleanUpStage:
    """`clean_up` of a text that arrives in pieces."""

    __slots__ = ("_rules",)

    def __init__(self) -> None:
        self._rules = [ReplaceText(old, new) for old, new in _REPLACED]

    def push(self, piece: str) -> list[str]:
        """Take a piece and return what no later one can change."""
        for rule in self._rules:
            piece = "".join(rule.push(piece))
        return [piece]

    def flush(self) -> list[str]:
        """Return what was held back: the text has ended."""
        text = ""
        for rule in self._rules:
            text = "".join(rule.push(text) + rule.flush())
        return [text]

    def settle(self) -> list[str]:
        """Return what was held back: the prompt's text has ended."""
        return self.flush()

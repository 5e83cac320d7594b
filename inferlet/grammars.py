"""What an answer must match, as it is said to `Context.generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from pie.inferlet.errors import BadCallError
from pie.wire.messages import Grammar, GrammarKind


def grammar_of(
    *,
    schema: Mapping[str, object] | str | None,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
) -> Grammar | None:
    """Return what an answer must match; None where nothing is said.

    Raises:
        BadCallError: More than one thing is said, or `choice` is no list of texts.
    """
    if choice is not None and not _are_texts(choice):
        raise BadCallError(f"choice is a list of texts, not {choice!r:.100}")
    said = [
        Grammar(kind, text)
        for kind, text in (
            (GrammarKind.JSON_SCHEMA, _json(schema)),
            (GrammarKind.REGEX, regex),
            (GrammarKind.CHOICE, None if choice is None else _json(list(choice))),
            (GrammarKind.LARK, grammar),
        )
        if text is not None
    ]
    if len(said) > 1:
        raise BadCallError("an answer matches one of schema, regex, choice and grammar")
    return said[0] if said else None


def _are_texts(choice: object) -> bool:
    return (
        isinstance(choice, Sequence)
        and not isinstance(choice, str)
        and all(isinstance(one, str) for one in choice)
    )


def _json(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()

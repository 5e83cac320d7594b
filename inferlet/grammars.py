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
        BadCallError: More than one thing is said.
    """
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


def _json(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()

"""Formatted text in chat templates, its length known before it is made.

Covers `%` and `str.format`. Does not cover filters that pad (`pie.tokens.filters`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2.sandbox
from markupsafe import EscapeFormatter, Markup

from pie.tokens.limits import current
from pie.tokens.weight import length, weigh

ESCAPE_FACTOR = 5
"""How much longer escaping for HTML makes a text: a quote becomes `&#34;`."""
_FIELD_CHARS = 32
"""A field is read by Python code, as long as this many characters are copied."""
_FIELD = re.compile(
    r"(?P<nested>%\([^()]*\()"
    r"|%(?:\((?P<name>[^()]*)\))?[-+ #0]*(?P<width>\*|\d+)?(?:\.(?P<precision>\*|\d+)?)?[hlL]?."
    r"|%",
    re.DOTALL,
)
_NUMBER = re.compile(r"\d+")


def check_percent(text: str, given: object) -> None:
    """Refuse `text % given` if the result may be too long.

    Raises:
        TemplateLimitError: It may.
    """
    run = current()
    run.check_size(_FIELD_CHARS * text.count("%"))
    factor = ESCAPE_FACTOR if isinstance(text, Markup) else 1
    chars = len(text)
    letters: set[str] = set()
    for field in _FIELD.finditer(text):
        run.tick()
        name, letter = field["name"], field[0][-1]
        if field["nested"] is not None:
            chars += _written(given, "a") * factor
        elif name is not None and isinstance(given, Mapping):
            chars += _written(given.get(name), letter) * factor
        else:
            letters.add(letter)
        for size in (field["width"], field["precision"]):
            chars += _largest(given) if size == "*" else int(size or 0)
        run.check_size(chars)
    # Without names, each value is written once.
    values = given if isinstance(given, tuple) else (given,)
    for letter in letters - {"%"}:
        chars += sum(_written(value, letter) for value in values) * factor
        run.check_size(chars)


def _written(value: object, letter: str) -> int:
    """Return how long a field is at most, without padding."""
    if letter in "ra":
        # In a list, it counts with the escapes that `repr` writes.
        return weigh([value], escaped=True, ascii_only=letter == "a").chars
    return length(value)


def _largest(given: object) -> int:
    """Return the largest number given, which a `*` may take for a width."""
    values = given if isinstance(given, tuple) else (given,)
    return max((abs(value) for value in values if isinstance(value, int)), default=0)


class Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format` with limits."""

    def __init__(self, env: jinja2.Environment, **options: Any) -> None:  # noqa: ANN401
        """Begin with no text."""
        super().__init__(env, **options)
        self._chars = 0

    def vformat(self, format_string: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Format, unless there are too many fields."""
        run = current()
        fields = format_string.count("{") + format_string.count("}")
        run.check_size(_FIELD_CHARS * fields + len(format_string))
        self._chars = len(format_string)
        return super().vformat(format_string, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> Any:  # noqa: ANN401
        """Format one field, unless it makes the text too long."""
        sizes = sum(int(number) for number in _NUMBER.findall(format_spec))
        self._chars += ESCAPE_FACTOR * (sizes + len(format_spec)) + length(value)
        current().check_size(self._chars)
        return super().format_field(value, format_spec)

    def convert_field(self, value: Any, conversion: Any) -> Any:  # noqa: ANN401
        """Write a value out, unless that is too long."""
        if conversion is not None:
            _written(value, "a")
        return super().convert_field(value, conversion)


class EscapingFormatter(Formatter, EscapeFormatter):
    """The same for text that escapes what is put into it."""

"""Filters and tests of chat templates, each asking before it works.

Covers what a filter may make of what it is given. Does not cover what it makes: that is jinja2's
own filter, so that the text is the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

from jinja2.runtime import Undefined

from pie.tokens.errors import TemplateLimitError
from pie.tokens.formatting import ESCAPE_FACTOR, check_percent
from pie.tokens.limits import current
from pie.tokens.methods import check_lines, check_replace, check_stripped
from pie.tokens.weight import is_plain, length, weigh

Filter = Callable[..., Any]
_Check = Callable[..., object]

_SLOT_BYTES = 8
_CHARACTER_BYTES = 80
"""A string of one character that Python does not keep ready."""
_MOST_DIGITS = 4096
_ATTRIBUTE_CHARS = 4096

_FACTORS = {
    "capitalize": 3,
    "e": ESCAPE_FACTOR,
    "escape": ESCAPE_FACTOR,
    "forceescape": ESCAPE_FACTOR,
    "lower": 3,
    "pprint": 256,
    "string": 1,
    "title": 32,
    "trim": 1,
    "upper": 3,
    "urlencode": 64,
    "urlize": 256,
    "wordcount": 32,
    "xmlattr": 64,
}
"""How much longer or slower than copying a text these are."""

_UNREAD = ("d", "default")
"""Filters that only pass their arguments on."""
_COMPARED = [
    "filter",
    "test",
    "==",
    "eq",
    "equalto",
    "!=",
    "ne",
    ">",
    "gt",
    "greaterthan",
    ">=",
    "ge",
    "<",
    "lt",
    "lessthan",
    "<=",
    "le",
    "in",
    "lower",
    "upper",
    "divisibleby",
]
"""Tests that may go through all of a value."""


def guarded_filter(name: str, work: Filter) -> Filter:
    """Return a filter that asks first, and whose result counts."""
    first = 1 if hasattr(work, "jinja_pass_arg") else 0
    check = _CHECKS.get(name)
    factor = _FACTORS.get(name)

    @functools.wraps(work)
    def guarded(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        run = current()
        run.tick()
        before, given = args[:first], args[first:]
        # Arguments are compared, hashed or put between parts of the text; a default is not.
        extra = 0 if name in _UNREAD else weigh(*given[1:], *named.values()).chars
        if factor is not None and given:
            run.check_size((factor + extra) * length(given[0]))
        elif check is not None and given:
            given = (check(*given, **named), *given[1:])
        result = work(*before, *given, **named)
        if isinstance(result, Iterable) and not isinstance(result, Sized | Undefined):
            return run.each(result)
        return run.note(result)

    return guarded


def guarded_test(name: str, test: object) -> Filter:
    """Return a test that asks first."""
    work = cast("Filter", test)
    if name not in _COMPARED:
        return work
    first = 1 if hasattr(work, "jinja_pass_arg") else 0

    @functools.wraps(work)
    def guarded(*args: Any) -> Any:  # noqa: ANN401
        compared(*args[first:])
        return work(*args)

    return guarded


def compared(*values: object) -> None:
    """Refuse values that take too long to compare."""
    run = current()
    for value in values:
        if isinstance(value, str):
            run.check_size(len(value))
        elif value is not None and not isinstance(value, bool | Undefined):
            weigh(value, escaped=True)


def listed(values: Any) -> Any:  # noqa: ANN401
    """Return a value that has a length: what is made one by one is made now."""
    if isinstance(values, str):
        size = _SLOT_BYTES if values.isascii() else _CHARACTER_BYTES
        current().check_size(size * len(values))
    elif isinstance(values, Iterable) and not isinstance(values, Sized | Undefined):
        return list(current().each(values))
    elif isinstance(values, Sized):
        current().check_size(_SLOT_BYTES * len(values))
    return values


def _ordered(values: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
    """Values that are compared with each other, perhaps by an attribute."""
    values = listed(values)
    weigh(values)
    _check_attribute(values, *args, *named.values())
    return values


def _check_attribute(values: object, *names: object) -> None:
    """Refuse to collect attributes of what is not plain, whose size is not known beforehand."""
    for name in names:
        if isinstance(name, str) and len(name) > _ATTRIBUTE_CHARS:
            raise TemplateLimitError("The chat template asks for an attribute of too long a name.")
    if names and isinstance(values, Iterable) and not is_plain(values):
        raise TemplateLimitError("The chat template collects attributes of more than plain values.")


def _mapped(values: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
    for name in (*args, *named.values()):
        if isinstance(name, str) and len(name) > _ATTRIBUTE_CHARS:
            # A test or filter may compare with a long text, no attribute has such a name.
            current().check_size(64 * len(name))
    # An empty one stays: the filter then does not look at its arguments.
    return _each(values) if values else values


def _each(values: Any) -> Any:  # noqa: ANN401
    run = current()
    for value in values:
        run.tick()
        yield value


def _joined(values: Any, d: object = "", attribute: object = None) -> Any:  # noqa: ANN401
    values = listed(values)
    if attribute is not None:
        _check_attribute(values, attribute)
    between = length(d)
    count = len(values) if isinstance(values, Sized) else 0
    if isinstance(values, str):
        chars = len(values)
    elif isinstance(values, list | tuple) and all(isinstance(value, str) for value in values):
        chars = sum(map(len, values))
    else:
        chars = weigh(values, escaped=True).chars
    has_markup = any(hasattr(value, "__html__") for value in (d, *_items(values)))
    current().check_size((chars + between * count) * (ESCAPE_FACTOR if has_markup else 1))
    return values


def _items(values: object) -> Iterable[object]:
    return values if isinstance(values, list | tuple) else ()


def _summed(values: Any, attribute: object = None, start: object = 0) -> Any:  # noqa: ANN401
    values = listed(values)
    if attribute is not None:
        _check_attribute(values, attribute)
    if not isinstance(start, int | float):
        # Each sum of lists is a new list.
        count = len(values) if isinstance(values, Sized) else 0
        current().check_size(_SLOT_BYTES * weigh(values, start).nodes * count)
    return values


def _centered(text: object, width: int = 80) -> object:
    current().check_size(max(length(text), width))
    return text


def _indented(
    text: object,
    width: int | str = 4,
    first: bool = False,  # noqa: ARG001
    blank: bool = False,  # noqa: ARG001
) -> object:
    plain = text if isinstance(text, str) else str(text) if length(text) else ""
    check_lines(plain, len(width) if isinstance(width, str) else max(0, width))
    return text


def _replaced(text: object, old: object, new: object, count: int | None = None) -> object:
    written = [value if isinstance(value, str) else _text(value) for value in (text, old, new)]
    check_replace(written[0], written[1], written[2], -1 if count is None else count)
    if any(hasattr(value, "__html__") for value in (text, old, new)):
        current().check_size(ESCAPE_FACTOR * len(written[0]))
        escaped = ESCAPE_FACTOR * len(written[2]) * (written[0].count(written[1]) + 1)
        current().check_size(escaped)
    return text


def _text(value: object) -> str:
    length(value)
    return str(value)


def _formatted(text: object, *args: object, **named: object) -> object:
    check_percent(text if isinstance(text, str) else _text(text), named or args)
    return text


def _batched(values: Any, linecount: int, fill_with: object = None) -> Any:  # noqa: ANN401
    del fill_with
    current().check_size(_SLOT_BYTES * linecount)
    return _each(listed(values)) if values else values


def _sliced(values: Any, slices: int, fill_with: object = None) -> Any:  # noqa: ANN401
    del slices, fill_with
    return listed(values)


def _rounded(value: object, precision: int = 0, method: str = "common") -> object:
    del method
    _check_digits(precision)
    return value


def _check_digits(count: int) -> None:
    if abs(count) > _MOST_DIGITS:
        raise TemplateLimitError(f"The chat template rounds to more than {_MOST_DIGITS} digits.")


def _number(value: object, *args: object, **named: object) -> object:
    del args, named
    if isinstance(value, str | bytes):
        current().check_size(1024 * len(value))
    return value


def _wrapped(
    text: object,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> object:
    del break_long_words, break_on_hyphens, width
    # Its time grows with the square of a long word.
    chars = length(text)
    current().check_size(1024 * chars)
    current().check_size((chars + 1) * (1 + len(wrapstring or "")))
    return text


def _truncated(text: object, *args: object, **named: object) -> object:
    current().check_size(length(text) + weigh(args, named).chars)
    return text


def _stripped(text: object) -> object:
    check_stripped(text if isinstance(text, str) else _text(text))
    return text


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models have seen it: jinja2's own filter escapes what HTML would misread."""
    # In a list, a text alone counts with its escapes.
    weight = weigh([value], escaped=True, ascii_only=ensure_ascii)
    each = sum(map(len, separators)) if separators is not None else 2
    if indent is not None:
        each += 1 + weight.depth * (len(indent) if isinstance(indent, str) else max(0, indent))
    current().check_size(weight.chars + weight.nodes * each)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort", "unique"), _ordered),
    **dict.fromkeys(("list", "random", "reverse"), listed),
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _mapped),
    **dict.fromkeys(("filesizeformat", "float", "int"), _number),
    "batch": _batched,
    "center": _centered,
    "format": _formatted,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "slice": _sliced,
    "striptags": _stripped,
    "sum": _summed,
    "truncate": _truncated,
    "wordwrap": _wrapped,
}

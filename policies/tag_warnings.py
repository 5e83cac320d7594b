"""Selectors of tenants, conversations and models that are not there: no mistake of the file, but likely one.

Covers finding them wherever a policy file may say them (rules, and options of policies that are annotated as
such), patterns that no tag is like, whoever asks, and tenants that are not among those known. Does not cover
what tags are made of (`pie.router.tenant`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pie.policies.document import Entry
from pie.policies.errors import Problem
from pie.policies.options import marked
from pie.policies.patterns import is_of
from pie.policies.units import SelectsBy

TAG_DIGITS = 16
"""Digits, in hexadecimal, of a tenant's or conversation's tag."""
_ROOT_DIGITS = 64
_HEX = "0123456789abcdef"
_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
_TAG = f"a tag is {TAG_DIGITS} digits of 0-9 and a-f, as `pie explain` shows it"
_ROOT = f"a model's root is {_ROOT_DIGITS} digits of 0-9 and a-f, as `pie pages` shows it"
_SHAPES: Mapping[str, tuple[int, str]] = {
    "tenant": (TAG_DIGITS, _TAG),
    "session": (TAG_DIGITS, _TAG),
    "model": (_ROOT_DIGITS, _ROOT),
}


@dataclass(frozen=True, slots=True)
class TagPattern:
    """What a selector in a policy file goes by, and where it stands."""

    line: int
    column: int
    path: str
    what: str
    """`tenant`, `session` or `model`."""
    pattern: str


def patterns_in(kind: type[object], entries: Iterable[Entry], path: str) -> Iterator[TagPattern]:
    """Yield what a policy or a rule selects by.

    Args:
        kind: Whose options they are.
        entries: The options as the file has them.
        path: Where in the file that is.
    """
    marks = marked(kind, SelectsBy)
    for entry in entries:
        mark, pattern = marks.get(entry.key), entry.value.plain
        if mark is not None and mark.what in _SHAPES and isinstance(pattern, str):
            yield TagPattern(entry.line, entry.column, f"{path}.{entry.key}", mark.what, pattern)


def tag_warnings(patterns: Iterable[TagPattern]) -> list[Problem]:
    """Return a warning for each one that no tag or root can be like, such as a tenant's name."""
    return [
        Problem(
            one.line,
            one.column,
            one.path,
            f"no page is meant: {_SHAPES[one.what][1]}, and none is like {one.pattern!r}",
        )
        for one in patterns
        if one.pattern and not _may_be(one)
    ]


def unknown_tenants(patterns: Iterable[TagPattern], tags: Collection[str]) -> list[Problem]:
    """Return a warning for each one of a tenant that is none of those whose tags are given."""
    return [
        Problem(
            one.line,
            one.column,
            one.path,
            f"no known tenant has a tag like {one.pattern!r}",
        )
        for one in patterns
        if one.what == "tenant" and one.pattern
        if _may_be(one) and not any(is_of(one.pattern, tag) for tag in tags)
    ]


def _may_be(one: TagPattern) -> bool:
    """Say whether some word of so many hexadecimal digits is like a pattern."""
    digits, _ = _SHAPES[one.what]
    tokens: Sequence[str] = _TOKEN.findall(one.pattern)
    single = [token for token in tokens if token != "*"]  # noqa: S105
    if len(single) > digits or (len(single) < digits and len(single) == len(tokens)):
        return False
    return all(any(is_of(token, digit) for digit in _HEX) for token in single)

"""Rules about tenants, conversations and models that are not there: no mistake of the file, but likely one.

Covers patterns that no tag is like, whoever asks, and tenants that are not among those known. Does not
cover what tags are made of (`pie.router.tenant`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

from pie.policies.errors import Problem
from pie.policies.rules import Rule

TAG_DIGITS = 16
"""Digits, in hexadecimal, of a tenant's or conversation's tag."""
_ROOT_DIGITS = 64
_HEX = "0123456789abcdef"
_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)


def tag_warnings(rules: Sequence[Rule]) -> list[Problem]:
    """Return a warning for each selector that no tag or root can be like, such as a tenant's name."""
    return [
        Problem(
            rule.line,
            rule.column,
            f"worker.rules[{number}].match.{name}",
            f"no page is meant: {what}, and none is like {pattern!r}",
        )
        for number, rule in enumerate(rules)
        for name, pattern, digits, what in _patterns(rule)
        if pattern and not _may_be(pattern, digits)
    ]


def unknown_tenants(rules: Sequence[Rule], tags: Collection[str]) -> list[Problem]:
    """Return a warning for each selector of a tenant that is none of those whose tags are given."""
    return [
        Problem(
            rule.line,
            rule.column,
            f"worker.rules[{number}].match.tenant",
            f"no known tenant has a tag like {pattern!r} (pages of requests that bring a `cache_salt` of "
            "their own may)",
        )
        for number, rule in enumerate(rules)
        for pattern in (rule.selector.tenant,)
        if pattern and _may_be(pattern, TAG_DIGITS) and not _any_like(tags, pattern)
    ]


def _patterns(rule: Rule) -> Iterator[tuple[str, str | None, int, str]]:
    selector = rule.selector
    tag = f"a tag is {TAG_DIGITS} digits of 0-9 and a-f, as `pie explain` shows it"
    yield "tenant", selector.tenant, TAG_DIGITS, tag
    yield "session", selector.session, TAG_DIGITS, tag
    root = f"a model's root is {_ROOT_DIGITS} digits of 0-9 and a-f, as `pie pages` shows it"
    yield "model", selector.model, _ROOT_DIGITS, root


def _may_be(pattern: str, digits: int) -> bool:
    """Say whether some word of so many hexadecimal digits is like a pattern."""
    tokens = _TOKEN.findall(pattern)
    single = [token for token in tokens if token != "*"]  # noqa: S105
    if len(single) > digits or (len(single) < digits and len(single) == len(tokens)):
        return False
    return all(any(fnmatch.fnmatchcase(digit, token) for digit in _HEX) for token in single)


def _any_like(tags: Iterable[str], pattern: str) -> bool:
    return any(fnmatch.fnmatchcase(tag, pattern) for tag in tags)

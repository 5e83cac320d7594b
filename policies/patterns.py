"""Whose pages a policy means: patterns for the tags of tenants and conversations, and for the roots of models.

Covers what a pattern means, and whether it means all that another one does. Pure. Does not cover which options are
patterns (`pie.policies.units`) or warning of those that nothing is like (`pie.policies.tag_warnings`).
"""

from __future__ import annotations

import fnmatch

_WILD = frozenset("*?[")


def is_of(pattern: str | None, told: str | bytes) -> bool:
    """Say whether a tag, or a root, which is taken in hexadecimal, is one that a pattern means; None means any."""
    if pattern is None:
        return True
    return fnmatch.fnmatchcase(told if isinstance(told, str) else told.hex(), pattern)


def takes_all_of(pattern: str | None, other: str | None) -> bool:
    """Say whether `pattern` certainly matches all that `other` matches; None matches anything."""
    if pattern is None or pattern == "*":
        return True
    if other is None or pattern == other:
        return pattern == other
    if not _WILD & set(other):
        return fnmatch.fnmatchcase(other, pattern)
    begins, last = pattern[:-1], pattern[-1:]
    if last != "*" or _WILD - {"?"} & set(begins):
        return False
    # As many characters, each of which is one that both mean or that the pattern leaves open.
    return len(other) >= len(begins) and all(
        theirs not in "*[" and ours in ("?", theirs)
        for ours, theirs in zip(begins, other, strict=False)
    )

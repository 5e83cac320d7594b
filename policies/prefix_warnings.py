"""Named prefixes that fill no page: no mistake of the file, but nothing comes of them.

Covers finding them with a model's tokens at hand, or by the tokens that the file gives. Does not cover whose tokenizer
that is (`pie.router.named_prefixes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie.policies.errors import Problem
from pie.policies.policy_set import PolicySet
from pie.policies.prefixes import NamedPrefix


def short_prefixes(
    policies: PolicySet,
    page_tokens: int,
    tokens_of: Callable[[NamedPrefix], Sequence[int] | None] = lambda prefix: prefix.tokens,
    *,
    model: str = "",
) -> list[Problem]:
    """Return a warning for each prefix that is shorter than a page.

    Args:
        policies: Which prefixes there are, and where.
        page_tokens: Tokens in a page.
        tokens_of: A prefix's tokens; None where they are not known.
        model: With which that is so; empty for any.
    """
    found = []
    for name, prefix in policies.prefixes.named.items():
        tokens = None if prefix.key is not None else tokens_of(prefix)
        if tokens is not None and len(tokens) < page_tokens:
            line, column, path = policies.prefix_places[name]
            count = f"{len(tokens)} token{'' if len(tokens) == 1 else 's'}"
            message = f"no page is meant: it is {count}, and a page {page_tokens}"
            if model:
                message += f" of {model!r}"
            found.append(Problem(line, column, path, message))
    return found

"""Named prefixes as the policy file has them.

    prefixes:
      support: {system: You are the support desk of the harbour.}

Covers what may be said there. Does not cover the rest of the file (`pie.policies.loader`) or what
prefixes are (`pie.policies.prefixes`).
"""

from __future__ import annotations

from collections.abc import Mapping

from pie.policies.document import Value
from pie.policies.errors import Problem
from pie.policies.options import check_options
from pie.policies.prefixes import NamedPrefix
from pie.policies.rules import PREFIX_NAME

PREFIXES = "prefixes"
_MOST_PREFIXES = 1000


def read_prefixes(value: Value, problems: list[Problem]) -> Mapping[str, NamedPrefix]:
    """Return the prefixes in a mapping; adds what is wrong with them to `problems`."""
    if value.entries is None:
        if value.plain is not None:
            message = "must hold names of prefixes, each with `text`, `system`, `tokens` or `key`"
            problems.append(Problem(value.line, value.column, PREFIXES, message))
        return {}
    if len(value.entries) > _MOST_PREFIXES:
        message = f"has {len(value.entries)} prefixes; at most {_MOST_PREFIXES} are allowed"
        problems.append(Problem(value.line, value.column, PREFIXES, message))
        return {}
    prefixes: dict[str, NamedPrefix] = {}
    for entry in value.entries:
        path = f"{PREFIXES}.{entry.key}"
        if not PREFIX_NAME.fullmatch(entry.key):
            message = "a name is letters, digits, `_` and `-`, at most 63, and begins with a letter"
            problems.append(Problem(entry.line, entry.column, path, message))
            continue
        given = entry.value.entries
        if given is None:
            message = "must hold one of `text`, `system`, `tokens` and `key`"
            problems.append(Problem(entry.value.line, entry.value.column, path, message))
            continue
        values, wrong = check_options(NamedPrefix, {one.key: one.value.plain for one in given})
        at = {one.key: one for one in given}
        for problem in wrong:
            place = at.get(problem.option) or entry
            below = f"{path}.{problem.option}" if problem.option else path
            message = problem.message.removeprefix("NamedPrefix refuses its options: ")
            problems.append(Problem(place.line, place.column, below, message))
        if not wrong:
            prefixes[entry.key] = NamedPrefix(**values)  # type: ignore[arg-type]
    return prefixes

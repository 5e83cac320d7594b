"""Named prefixes as the policy file has them.

    prefixes:
      support: {system: You are the support desk of the harbour.}

Covers what may be said there. Does not cover the rest of the file (`pie.policies.loader`) or what
prefixes are (`pie.policies.prefixes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pie.policies.document import Entry, Value
from pie.policies.errors import Problem
from pie.policies.options import check_options, marked
from pie.policies.prefixes import PREFIX_NAME, NamedPrefix, PrefixPlace
from pie.policies.registry import did_you_mean
from pie.policies.units import SelectsBy

PREFIXES = "prefixes"
_MOST_PREFIXES = 1000


def read_prefixes(
    value: Value, problems: list[Problem], places: dict[str, PrefixPlace]
) -> Mapping[str, NamedPrefix]:
    """Return the prefixes in a mapping; adds what is wrong with them to `problems`, and where they stand to `places`."""
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
            option = next(one for one in given if one.value.plain is not None)
            places[entry.key] = PrefixPlace(option.line, option.column, f"{path}.{option.key}")
    return prefixes


def check_named(
    kind: type[object],
    entries: Iterable[Entry],
    path: str,
    prefixes: Mapping[str, NamedPrefix],
    problems: list[Problem],
) -> None:
    """Add to `problems` what options of a policy or rule say of prefixes that the file does not name.

    Args:
        kind: Whose options they are.
        entries: The options as the file has them.
        path: Where in the file that is.
        prefixes: Those that the file names.
        problems: What is wrong with the file.
    """
    marks = marked(kind, SelectsBy)
    for entry in entries:
        mark, name = marks.get(entry.key), entry.value.plain
        if mark is None or mark.what != "prefix" or not isinstance(name, str):
            continue
        if PREFIX_NAME.fullmatch(name) and name not in prefixes:
            message = (
                f"there is no prefix {name!r}{did_you_mean(name, prefixes)}; it is a name from "
                "`prefixes` or a page's key of 64 hexadecimal digits"
            )
            at = entry.value
            problems.append(Problem(at.line, at.column, f"{path}.{entry.key}", message))

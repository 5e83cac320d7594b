"""Retention rules as the policy file has them.

    worker:
      rules:
        - match: {tenant: "8f2c*", tier: [host, disk]}
          action: quota
          max: 2GiB

Covers what a rule may say, and rules that can never match: a `quota` leaves all to the other rules, and they to it. Does not cover the rest of the file
(`pie.policies.loader`) or what rules do (`pie.policies.rules`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pie.page.events import Tier
from pie.policies.document import Entry, Value
from pie.policies.errors import Problem
from pie.policies.options import OptionProblem, check_options
from pie.policies.prefix_loader import check_named
from pie.policies.prefixes import NamedPrefix
from pie.policies.registry import did_you_mean
from pie.policies.rules import ACTIONS, Action, Quota, Rule, Selector, covering
from pie.policies.tag_warnings import TagPattern, patterns_in

_OF_POOL = frozenset({Tier.POOL_RAM, Tier.POOL_DISK, Tier.POOL_OBJECT})
MAX_RULES = 100
"""A page is held against each of them once."""


def read_rules(
    value: Value,
    path: str,
    problems: list[Problem],
    prefixes: Mapping[str, NamedPrefix],
    patterns: list[TagPattern],
    warnings: list[Problem],
) -> tuple[Rule, ...]:
    """Return the rules in a list, which may name `prefixes`.

    Adds what is wrong to `problems`, what selectors go by to `patterns`, and what is likely not meant to `warnings`.
    """
    if value.items is None:
        if value.plain is not None:
            message = "must be a list of rules, each with `match` and `action`"
            problems.append(Problem(value.line, value.column, path, message))
        return ()
    if len(value.items) > MAX_RULES:
        message = f"has {len(value.items)} rules; at most {MAX_RULES} are allowed"
        problems.append(Problem(value.line, value.column, path, message))
        return ()
    rules: list[Rule] = []
    # Those of rules whose options are wrong too, so that all that is wrong is told at once.
    earlier: dict[bool, list[tuple[Selector, int]]] = {True: [], False: []}
    """Selectors and lines, of quotas and of others."""
    for number, item in enumerate(value.items):
        where = f"{path}[{number}]"
        if item.entries is None:
            message = "must be a rule: `match`, `action`, and the action's options"
            problems.append(Problem(item.line, item.column, where, message))
            continue
        entries = {entry.key: entry for entry in item.entries}
        kind = _kind(entries.get("action"))
        match = entries.pop("match", None)
        selector = _selector(match, where, problems, prefixes)
        if match is not None:
            patterns += patterns_in(Selector, match.value.entries or [], f"{where}.match")
        rule = _rule(item, entries, selector, where, problems)
        if selector is not None and match is not None:
            warnings += _not_in_pool(selector, match, where, prefixes)
        if selector is None or kind is None:
            continue
        alike = earlier[kind is Quota]
        covered = covering([one for one, _ in alike], selector, prefixes)
        takers = [str(alike[n][1]) for n in covered]
        if takers:
            who = f"rule in line {takers[0]} takes"
            if len(takers) > 1:
                who = f"rules in lines {', '.join(takers[:-1])} and {takers[-1]} take"
            message = f"can never match: the {who} all that it is about"
            problems.append(Problem(item.line, item.column, where, message))
        alike.append((selector, item.line))
        if rule is not None:
            rules.append(rule)
    return tuple(rules)


def _not_in_pool(
    selector: Selector, match: Entry, path: str, prefixes: Mapping[str, NamedPrefix]
) -> list[Problem]:
    """Return a warning where a rule means a prefix in the pool whose pages nobody knows there."""
    named = prefixes.get(selector.prefix_name or "")
    if named is None or (named.text or named.system) is None:
        return []
    if not selector.tiers or not selector.tiers & _OF_POOL:
        return []
    at = next(entry for entry in match.value.entries or () if entry.key == "prefix")
    given = "text" if named.system is None else "system"
    message = (
        f"no page at a pool node is meant: it has no tokenizer, and {selector.prefix_name!r} is given as `{given}`; "
        "give `tokens` or `key`"
    )
    return [Problem(at.line, at.column, f"{path}.match.prefix", message)]


def _kind(action: Entry | None) -> type[Action] | None:
    """Return the action that is named; None where there is no such one."""
    name = None if action is None else action.value.plain
    return ACTIONS.get(name) if isinstance(name, str) else None


def _rule(
    item: Value,
    entries: dict[str, Entry],
    selector: Selector | None,
    path: str,
    problems: list[Problem],
) -> Rule | None:
    named = entries.pop("action", None)
    allowed = ", ".join(f"`{name}`" for name in ACTIONS)
    if named is None:
        message = f"`action` is missing; allowed are {allowed}"
        problems.append(Problem(item.line, item.column, path, message))
        return None
    name = named.value.plain
    if not isinstance(name, str) or name not in ACTIONS:
        hint = did_you_mean(name, ACTIONS) if isinstance(name, str) else ""
        message = f"there is no action {name!r}{hint}; allowed are {allowed}"
        at = named.value
        problems.append(Problem(at.line, at.column, f"{path}.action", message))
        return None
    values, wrong = _checked(ACTIONS[name], list(entries.values()))
    _tell(wrong, list(entries.values()), named.value, path, problems)
    if wrong or selector is None:
        return None
    action = ACTIONS[name](**values)  # type: ignore[arg-type]
    return Rule(selector, name, action)


def _selector(
    match: Entry | None, path: str, problems: list[Problem], prefixes: Mapping[str, NamedPrefix]
) -> Selector | None:
    if match is None or match.value.plain is None:
        return Selector()
    value, path = match.value, f"{path}.match"
    if value.entries is None:
        message = "must hold what a page must be, such as `tenant: …`"
        problems.append(Problem(value.line, value.column, path, message))
        return None
    values, wrong = _checked(Selector, value.entries)
    _tell(wrong, value.entries, value, path, problems)
    if wrong:
        return None
    selector = Selector(**values)  # type: ignore[arg-type]
    before = len(problems)
    check_named(Selector, value.entries, path, prefixes, problems)
    return selector if len(problems) == before else None


def _checked(
    kind: type[object], entries: Sequence[Entry]
) -> tuple[dict[str, object], list[OptionProblem]]:
    return check_options(kind, {entry.key: entry.value.plain for entry in entries})


def _tell(
    wrong: Sequence[OptionProblem],
    entries: Sequence[Entry],
    whole: Value,
    path: str,
    problems: list[Problem],
) -> None:
    at = {entry.key: entry for entry in entries}
    for problem in wrong:
        entry = at.get(problem.option)
        line, column = (entry.line, entry.column) if entry else (whole.line, whole.column)
        where = f"{path}.{problem.option}" if entry else path
        problems.append(Problem(line, column, where, problem.message))

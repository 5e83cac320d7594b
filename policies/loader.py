"""The policy file: YAML that names a policy for each decision.

    worker:
      retention: lru
      rules:
        - match: {tier: disk}
          action: ttl
          after: 1d
    cluster:
      routing:
        policy: cost
        miss_weight: 5
      migration:
        - policy: spill-to-pool
          above: 0.9
      scale:
        policy: by-load
        max: 4

Covers what the file may say; a bad one never takes effect, and all that is wrong with it is
reported at once. Does not cover YAML itself (`pie.policies.document`) or what policies there are
(`pie.policies.registry`) and what rules may say (`pie.policies.rule_loader`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pie.policies.containing import is_builtin
from pie.policies.document import MAX_BYTES, Entry, Value, parse_document
from pie.policies.errors import PolicyFileError, PolicyLateError, Problem
from pie.policies.options import OptionProblem, check_options
from pie.policies.policy_set import PolicySet, PolicySpec, always
from pie.policies.prefix_loader import PREFIXES, check_named, read_prefixes
from pie.policies.prefixes import NamedPrefix, Prefixes, PrefixPlace
from pie.policies.reading import read_some
from pie.policies.registry import (
    ALWAYS,
    DEFAULT,
    PolicyClass,
    PolicyKind,
    UnknownPolicyError,
    did_you_mean,
    resolve,
)
from pie.policies.rule_loader import read_rules
from pie.policies.rules import Rule
from pie.policies.tag_warnings import TagPattern, patterns_in, tag_warnings
from pie.policies.telling import line, name_of, said_by
from pie.policies.user_code import LateError, UserCode

_RULES = "rules"
_HALVES: Mapping[str, tuple[PolicyKind, ...]] = {
    "worker": (PolicyKind.RETENTION,),
    "cluster": (
        PolicyKind.ROUTING,
        PolicyKind.REPLICATION,
        PolicyKind.MIGRATION,
        PolicyKind.SCALE,
    ),
}
_MOST_MIGRATION = 16
"""Every one of them is asked once a second."""
_MOST_SAID = 1_000
"""Characters of what is wrong with an option of a user's class: it may name all that are allowed."""


@dataclass(frozen=True, slots=True)
class PolicyText:
    """A policy file as it was read once: places that start later, or again, do not look at the file."""

    text: bytes | None = None
    """None is the built-ins, without a file."""
    name: str = ""
    """What messages call the file."""
    folder: Path = Path()
    """Where users' modules lie, besides Python's own path."""

    def load(self) -> PolicySet:
        """Return the policies that it names.

        Raises:
            PolicyFileError: It is not acceptable; lists every problem.
        """
        if self.text is None:
            return PolicySet()
        return load_policies(self.text, name=self.name, folder=self.folder)


def read_policy_file(file: Path | None) -> PolicyText:
    """Return what a file says; the built-ins where it is None.

    Raises:
        PolicyFileError: The file cannot be read.
    """
    if file is None:
        return PolicyText()
    try:
        # A byte more than allowed tells that there is too much, however large the file.
        text = read_some(file, MAX_BYTES + 1)
    except OSError as error:
        reason = error.strerror or str(error)
        raise PolicyFileError(str(file), [Problem(0, 0, "", f"cannot be read: {reason}")]) from None
    return PolicyText(text, str(file), file.absolute().parent)


def load_policy_file(file: Path | None) -> PolicySet:
    """Return the policies that a file names; the built-ins where `file` is None.

    Raises:
        PolicyFileError: The file cannot be read or is not acceptable; lists every problem.
    """
    return read_policy_file(file).load()


def load_policies(text: str | bytes, *, name: str, folder: Path | None = None) -> PolicySet:
    """Return the policies that the text of a policy file names.

    Args:
        text: The file's content. Where it names no policy, the built-in is used.
        name: What messages call the file.
        folder: Where users' modules lie, besides Python's own path.

    Raises:
        PolicyFileError: The text is not acceptable; lists every problem.
        PolicyLateError: Or code of the user's has not come back within `user_code.LIMIT_S`.
    """
    problems: list[Problem] = []
    specs: dict[PolicyKind, PolicySpec] = {}
    rules: tuple[Rule, ...] = ()
    of_rules: list[Problem] = []
    migration = always()
    prefixes: Mapping[str, NamedPrefix] = {}
    places: dict[str, PrefixPlace] = {}
    root = parse_document(text, problems)
    halves = _mapping(root, "", "two halves, `worker` and `cluster`", problems)
    for entry in halves:
        if entry.key == PREFIXES:
            prefixes = read_prefixes(entry.value, problems, places)
    reading = _Reading(folder, UserCode(), prefixes, problems)
    for half in halves:
        if half.key == PREFIXES:
            continue
        kinds = _HALVES.get(half.key)
        if kinds is None:
            problems.append(_unknown_key(half, "", [*_HALVES, PREFIXES], _belongs(half.key)))
            continue
        what = "kinds of policy, such as " + " and ".join(f"`{kind}`" for kind in kinds)
        for entry in _mapping(half.value, half.key, what, problems):
            if (half.key, entry.key) == ("worker", _RULES):
                path = f"{half.key}.{_RULES}"
                rules = read_rules(
                    entry.value, path, problems, prefixes, reading.patterns, of_rules
                )
                continue
            if entry.key not in kinds:
                allowed = [*(str(k) for k in kinds), *([_RULES] if half.key == "worker" else [])]
                problems.append(_unknown_key(entry, half.key, allowed, _belongs(entry.key)))
                continue
            kind = PolicyKind(entry.key)
            if kind is PolicyKind.MIGRATION:
                migration = _several(entry.value, f"{half.key}.{kind}", reading)
                continue
            spec = _spec(kind, entry.value, f"{half.key}.{kind}", reading)
            if spec is not None:
                specs[kind] = spec
    if problems:
        kind_of_error = PolicyLateError if reading.code.is_late else PolicyFileError
        raise kind_of_error(name, sorted(problems, key=lambda p: (p.line, p.column)))
    nothing = Problem(0, 0, "", "names nothing, so that all is built in")
    chosen = {str(kind): spec for kind, spec in specs.items()}
    return PolicySet(
        **chosen,
        migration=migration,
        rules=rules,
        text=text if isinstance(text, str) else text.decode("utf-8-sig"),
        file=name,
        folder=folder,
        prefixes=Prefixes(prefixes),
        prefix_places=places,
        patterns=tuple(reading.patterns),
        warnings=(*reading.warnings, *of_rules, *tag_warnings(reading.patterns))
        if halves
        else (nothing,),
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """What is known while a file is read, and what is found in it."""

    folder: Path | None
    code: UserCode
    prefixes: Mapping[str, NamedPrefix]
    problems: list[Problem]
    patterns: list[TagPattern] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    """One for each file in `code.changed`."""


@dataclass(frozen=True, slots=True)
class _Options:
    """A policy's options, and what is found in them."""

    values: Mapping[str, object]
    wrong: list[OptionProblem]
    patterns: list[TagPattern] = field(default_factory=list)
    unnamed: list[Problem] = field(default_factory=list)
    """What they say of prefixes that the file does not name."""


def _several(value: Value, path: str, reading: _Reading) -> tuple[PolicySpec, ...]:
    """Return the migration policies that a list names, and those that are always there."""
    if value.items is None:
        if value.plain is not None:
            message = "must be a list of policies, each a name or `policy: name` with its options"
            reading.problems.append(Problem(value.line, value.column, path, message))
        return always()
    if len(value.items) > _MOST_MIGRATION:
        message = f"has {len(value.items)} policies; at most {_MOST_MIGRATION} are allowed"
        reading.problems.append(Problem(value.line, value.column, path, message))
        return always()
    specs: list[PolicySpec] = []
    for number, item in enumerate(value.items):
        spec = _spec(PolicyKind.MIGRATION, item, f"{path}[{number}]", reading)
        if spec is None:
            continue
        if spec.name in ALWAYS and spec.name in {one.name for one in specs}:
            message = f"{spec.name!r} is named twice"
            reading.problems.append(Problem(item.line, item.column, f"{path}[{number}]", message))
        specs.append(spec)
    named = {spec.name for spec in specs}
    return (*specs, *(spec for spec in always() if spec.name not in named))


def _spec(kind: PolicyKind, value: Value, path: str, reading: _Reading) -> PolicySpec | None:
    """Return the policy that a value names, or add what is wrong with it to `problems`."""
    named, options = value, list[Entry]()
    if value.entries is not None:
        options = [entry for entry in value.entries if entry.key != "policy"]
        given = [entry for entry in value.entries if entry.key == "policy"]
        if not given:
            message = f"`policy` is missing: the policy's name, such as `{DEFAULT[kind]}`"
            reading.problems.append(Problem(value.line, value.column, path, message))
            return None
        named, path = given[0].value, f"{path}.policy"
    if not isinstance(named.plain, str):
        message = (
            f"must be a policy's name, such as `{DEFAULT[kind]}`, "
            "or `policy: name` with its options beside it"
        )
        reading.problems.append(Problem(named.line, named.column, path, message))
        return None
    try:
        factory = resolve(kind, named.plain, reading.folder, reading.code)
    except UnknownPolicyError as error:
        reading.problems.append(Problem(named.line, named.column, path, str(error)))
        return None
    for file in reading.code.changed[len(reading.warnings) :]:
        message = (
            f"{file.name} has changed since it was loaded, and the old code goes on: save the new "
            "code under a new module name, or restart what has loaded it"
        )
        reading.warnings.append(Problem(named.line, named.column, path, message))
    where = path.removesuffix(".policy")
    before = len(reading.problems)
    values, wrong = _read_options(factory, options, where, reading)
    at = {entry.key: entry for entry in options}
    for problem in wrong:
        entry = at.get(problem.option)
        line, column = (entry.line, entry.column) if entry else (named.line, named.column)
        below = where + (f".{problem.option}" if entry else "")
        reading.problems.append(Problem(line, column, below, problem.message))
    is_good = len(reading.problems) == before
    return PolicySpec(named.plain, factory, values) if is_good else None


def _read_options(
    factory: PolicyClass, entries: list[Entry], where: str, reading: _Reading
) -> tuple[Mapping[str, object], list[OptionProblem]]:
    """Return a policy's options as its constructor wants them, and what is wrong with them."""
    options = {entry.key: entry.value.plain for entry in entries}
    is_users, name = not is_builtin(factory), name_of(factory)

    def read() -> _Options:
        try:
            values, wrong = check_options(factory, options)
            found = _Options(values, wrong, list(patterns_in(factory, entries, where)))
            check_named(factory, entries, where, reading.prefixes, found.unnamed)
        except BaseException as error:
            if not is_users:
                raise
            said = said_by(error, names_kind=True)
            return _Options(
                {}, [OptionProblem("", f"the constructor of {name} cannot be read: {said}")]
            )
        return found

    try:
        named = ("made", id(factory), json.dumps(options, default=str))
        found = reading.code.run(named, read) if is_users else read()
    except LateError as error:
        return {}, [OptionProblem("", f"a new {name} {error}")]
    reading.patterns.extend(found.patterns)
    reading.problems.extend(found.unnamed)
    # What a user's class says may be of any length, and of any characters.
    wrong = [OptionProblem(one.option, line(one.message, _MOST_SAID)) for one in found.wrong]
    return found.values, wrong if is_users else found.wrong


def _mapping(value: Value, path: str, what: str, problems: list[Problem]) -> list[Entry]:
    """Return a mapping's entries; nothing for an empty value, and a problem for another kind."""
    if value.entries is not None:
        return value.entries
    if value.plain is not None:
        problems.append(Problem(value.line, value.column, path, f"must hold {what}"))
    return []


def _belongs(key: str) -> str:
    """Return where a key belongs; nothing where it is none of ours."""
    half = "worker" if key == _RULES else next((h for h, n in _HALVES.items() if key in n), "")
    return f"; it belongs under `{half}`" if half else ""


def _unknown_key(entry: Entry, path: str, allowed: list[str], hint: str = "") -> Problem:
    names = ", ".join(f"`{name}`" for name in allowed)
    meant = hint or did_you_mean(entry.key, allowed)
    message = f"unknown key {entry.key!r}{meant}; allowed here: {names}"
    return Problem(entry.line, entry.column, path, message)

"""`pie policy`: looking at policy files.

Covers what a person is told of a file, of what is in force by it, and of its schema. Does not cover
what a file may say (`pie.policies.loader`).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path

from pie.cluster.errors import ConfigError
from pie.policies.containing import is_builtin
from pie.policies.errors import PolicyFileError
from pie.policies.loader import PolicyText, load_policy_file, read_policy_file
from pie.policies.policy_set import PolicySet, PolicySpec, always, default_spec
from pie.policies.prefix_warnings import short_prefixes
from pie.policies.registry import PolicyKind
from pie.policies.saying import said
from pie.policies.schema import policy_schema

BUILT_IN = "no policy file: built-ins"

_ALWAYS_SAID = (PolicyKind.RETENTION, PolicyKind.ROUTING)
"""Kinds that a file's summary names also where they are the default."""


def checked(file: Path | None) -> PolicySet:
    """Return the policies that a file names.

    Raises:
        ConfigError: The file is not acceptable; lists every problem.
    """
    try:
        return load_policy_file(file)
    except PolicyFileError as error:
        raise ConfigError(error.told()) from error


def read(file: Path | None) -> PolicyText:
    """Return what a file says, without a look at whether it is acceptable.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return read_policy_file(file)
    except PolicyFileError as error:
        raise ConfigError(error.told()) from error


def summary(file: Path, policies: PolicySet) -> str:
    """Return a line about a file that is acceptable, and the policies that it names."""
    rules = f"{len(policies.rules)} rule{'' if len(policies.rules) == 1 else 's'}"
    names: dict[PolicyKind, list[str]] = {}
    usual = (*always(), *map(default_spec, PolicyKind))
    for kind, spec in policies.all():
        if kind in _ALWAYS_SAID or spec not in usual:
            names.setdefault(kind, []).append(f"`{spec.name}`")
    words = [f"{kind} {', '.join(names[kind])}" for kind in names]
    words.insert(1, rules)
    return f"{file}: good; {', '.join(words)}"


def warnings(file: Path, policies: PolicySet, page_tokens: int) -> list[str]:
    """Return what is no mistake of a file, and the policies that it names, but likely none of what was meant."""
    found = [*policies.warnings, *short_prefixes(policies, page_tokens)]
    return [one.told(str(file)) for one in sorted(found, key=lambda one: (one.line, one.column))]


def in_force(file: Path | None) -> str:
    """Return lines about each policy and rule of a file, or of the built-ins where there is none.

    Raises:
        ConfigError: The file is not acceptable; lists every problem.
    """
    policies = checked(file)
    first = f"from {file}" if file is not None else BUILT_IN
    return "\n".join([first, *lines_of(policies)])


def lines_of(policies: PolicySet, *, shortly: bool = False) -> list[str]:
    """Return a line about each policy and rule, defaults included.

    Args:
        policies: The policies.
        shortly: Leave out options of built-ins that are as they are without a word, so that equal policies have equal lines.
    """
    lines = []
    for kind, spec in policies.all():
        said_of_it = _options(spec.factory, _unusual(spec) if shortly else spec.options)
        lines.append(f"  {kind:<12}{spec.name}{said_of_it}")
    for number, rule in enumerate(policies.rules):
        options = _options(type(rule.action), rule.options)
        lines.append(f"  rule {number:<7}{rule.action_name}{options}; {rule.selector}")
    for name, prefix in policies.prefixes.named.items():
        lines.append(f"  prefix      {name}: {prefix}")
    return lines


def _unusual(spec: PolicySpec) -> Mapping[str, object]:
    """Return a policy's options, without those of a built-in that are what they are by default."""
    if not is_builtin(spec.factory):
        return spec.options
    usual = inspect.signature(spec.factory).parameters
    return {
        name: value
        for name, value in spec.options.items()
        if name not in usual or usual[name].default != value
    }


def _options(kind: type[object], options: Mapping[str, object]) -> str:
    return "".join(f", {name}: {value}" for name, value in said(kind, options).items())


def schema() -> str:
    """Return the JSON Schema of policy files."""
    return json.dumps(policy_schema(), indent=2)

"""The policy file's JSON Schema, for editors.

Covers built-in policies and rules, made from the constructors that check their options. Does not
cover users' policies, whose options only their classes know.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pie.policies.options import options_schema
from pie.policies.prefixes import PREFIX_NAME, NamedPrefix
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.rules import ACTIONS, Selector

_USERS = {
    "type": "object",
    "properties": {"policy": {"type": "string", "pattern": "^[A-Za-z_][\\w.]*:[A-Za-z_]\\w*$"}},
    "required": ["policy"],
}


def policy_schema() -> dict[str, object]:
    """Return the schema of a policy file (draft 2020-12)."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Pie policies",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "worker": _half({"retention": _policy(PolicyKind.RETENTION), "rules": _rules()}),
            "cluster": _half(
                {
                    "routing": _policy(PolicyKind.ROUTING),
                    "replication": _policy(PolicyKind.REPLICATION),
                    "migration": {
                        "type": ["array", "null"],
                        "items": _policy(PolicyKind.MIGRATION),
                    },
                    "scale": _policy(PolicyKind.SCALE),
                }
            ),
            "prefixes": {
                "type": ["object", "null"],
                "propertyNames": {"pattern": f"^{PREFIX_NAME.pattern}$"},
                "additionalProperties": {
                    **options_schema(NamedPrefix),
                    "minProperties": 1,
                    "maxProperties": 1,
                    "description": _first_line(NamedPrefix),
                },
            },
        },
    }


def _half(properties: Mapping[str, object]) -> dict[str, object]:
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": dict(properties),
    }


def _policy(kind: PolicyKind) -> dict[str, object]:
    names = list(BUILTIN[kind])
    users = {"type": "string", "pattern": _USERS["properties"]["policy"]["pattern"]}  # type: ignore[index]
    return {
        "anyOf": [
            {"enum": names},
            users,
            *(_named("policy", name, policy) for name, policy in BUILTIN[kind].items()),
            _USERS,
        ]
    }


def _rules() -> dict[str, object]:
    rules = []
    for name, action in ACTIONS.items():
        rule = _named("action", name, action)
        properties = rule["properties"]
        assert isinstance(properties, dict)
        properties["match"] = {**options_schema(Selector), "description": _first_line(Selector)}
        rules.append(rule)
    return {"type": ["array", "null"], "items": {"anyOf": rules}}


def _named(key: str, name: str, kind: type[object]) -> dict[str, object]:
    """Return the schema of a mapping that names a policy or action and has its options beside it."""
    schema = options_schema(kind)
    properties = schema.get("properties", {})
    needed = schema.get("required", [])
    assert isinstance(properties, dict)
    assert isinstance(needed, list)
    schema["properties"] = {key: {"const": name}, **properties}
    schema["required"] = [key, *needed]
    schema["description"] = _first_line(kind)
    return schema


def _first_line(kind: type[object]) -> str:
    return (inspect.getdoc(kind) or "").split("\n")[0]

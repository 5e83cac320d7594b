"""Every option that is a number is refused at its own place where it cannot be: built-ins, actions and selectors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies
from pie.policies.options import options_schema
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.rules import ACTIONS, Selector

_NEEDED = {"after": "1h", "copies": 2, "max": "1GiB"}
"""What some cannot do without."""


def kinds_in(schema: Any) -> set[str]:
    """Return what a schema says that a value may be."""
    if not isinstance(schema, dict):
        return set()
    found = {str(schema["type"])} if "type" in schema else set()
    for one in schema.get("anyOf", []):
        found |= kinds_in(one)
    return found


def numbers(kind: type[object]) -> Iterator[str]:
    for option, schema in options_schema(kind)["properties"].items():  # type: ignore[attr-defined]
        if kinds_in(schema) & {"number", "integer"}:
            yield option


def texts() -> Iterator[tuple[str, str]]:
    """Yield a policy file for each such option, the option alone in its second line with `VALUE` in it."""

    def text(before: str, kind: type[object], option: str, after: str) -> str:
        needed = options_schema(kind).get("required", [])
        others = {one: _NEEDED[one] for one in needed if one != option}  # type: ignore[attr-defined]
        rest = "".join(f", {name}: {value}" for name, value in others.items())
        return f"{before}{rest},\n  {option}: VALUE\n{after}"

    for kind, policies in BUILTIN.items():
        half = "worker" if kind is PolicyKind.RETENTION else "cluster"
        opened, closed = ("[{", "}]}") if kind is PolicyKind.MIGRATION else ("{", "}}")
        for name, policy in policies.items():
            for option in numbers(policy):
                before = f"{half}: {{{kind}: {opened}policy: {name}"
                yield f"{kind}-{name}-{option}", text(before, policy, option, closed)
    for name, action in ACTIONS.items():
        for option in numbers(action):
            before = f"worker: {{rules: [{{action: {name}"
            yield f"{name}-{option}", text(before, action, option, "}]}")
    for option in numbers(Selector):
        before = "worker: {rules: [{action: pin, match: {part: full"
        yield f"match-{option}", text(before, Selector, option, "}}]}")
    for option in ("prefix", "queue"):
        yield (
            f"routing-weighted-{option}",
            f"cluster: {{routing: {{policy: weighted,\n  scorers: {{{option}: VALUE}}}}}}",
        )


FILES = dict(texts())
BAD = ["-1", ".nan", ".inf", "-.inf", "1.0e+308", str(10**30), "'x'", "[1]", "true", "{a: 1}"]


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_a_number_that_cannot_be_is_refused_at_its_own_option(text: str) -> None:
    for bad in BAD:
        with pytest.raises(PolicyFileError) as caught:
            load_policies(text.replace("VALUE", bad), name="p.yaml")
        (problem,) = caught.value.problems
        option = text.splitlines()[1].split(":")[0].strip()
        assert (problem.line, problem.column) == (2, 3), bad
        assert problem.path.endswith(f".{option}")
        assert "must" in problem.message or "should" in problem.message
        assert ", not " in problem.message


def test_all_that_is_a_number_is_among_them() -> None:
    assert len(FILES) > 40
    assert {"routing-cost-decode_share", "scale-by-load-running", "ttl-after", "match-hits"} <= set(
        FILES
    )


def test_a_policy_that_refuses_what_two_options_say_together_is_told_at_the_first() -> None:
    text = "cluster:\n  scale:\n    policy: by-load\n    max: 2\n    min: 3\n"
    with pytest.raises(PolicyFileError) as caught:
        load_policies(text, name="p.yaml")
    (problem,) = caught.value.problems
    assert (problem.line, problem.path) == (5, "cluster.scale.min")


def test_the_schema_for_editors_bounds_them_too() -> None:
    for kind in (*(p for some in BUILTIN.values() for p in some.values()), *ACTIONS.values()):
        for option in numbers(kind):
            said = json.dumps(options_schema(kind)["properties"][option])  # type: ignore[index]
            assert "aximum" in said, (kind, option)

"""Rules in policy files, and the schema that editors check them with."""

import textwrap

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies
from pie.policies.rules import Pin, Quota, Ruled, Ttl
from pie.policies.schema import policy_schema

GOOD = """
    worker:
      retention: {policy: lfu, half_life: 4}
      rules:
        - match: {tenant: "8f*", tier: [host, disk], hits: 2}
          action: pin
          max: 2GiB
        - match: {tier: disk}
          action: ttl
          after: 12h
        - action: quota
          max: 1048576
    cluster:
      routing: cost
    """


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyFileError) as caught:
        load_policies(textwrap.dedent(text).lstrip("\n"), name="p.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_rules_are_read_in_order() -> None:
    policies = load_policies(textwrap.dedent(GOOD), name="p.yaml")
    assert [rule.action for rule in policies.rules] == [
        Pin(max=2 << 30),
        Ttl(after=12 * 3600.0),
        Quota(max=1 << 20),
    ]
    assert str(policies.rules[0].selector) == (
        "tenant is '8f*', tier is disk or host, used 2 times or more"
    )
    assert isinstance(policies.new_retention(), Ruled)


def test_everything_wrong_with_rules_is_told_at_once() -> None:
    assert problems(
        """
        worker:
          rules:
            - match: {prefix: "ab"}
              action: pin
            - match: {hits: -1, teir: disk}
              action: tll
            - action: ttl
              after: forever
            - action: pin
              max: -5
            - match: []
              action: quota
            - 7
            - match: {tier: floppy}
              action: ttl
              after: 0
            - action: ttl
              after: 10m
            - match: {part: state}
              action: pin
        """
    ) == [
        (
            "3:14: worker.rules[0].match: Selector refuses its options: "
            "`prefix` must be 64 hexadecimal digits"
        ),
        "5:15: worker.rules[1].match.hits: input should be greater than or equal to 1, not -1",
        (
            "5:25: worker.rules[1].match.teir: no such option, did you mean 'tier'?; "
            "allowed are `tenant`, `tier`, `part`, `prefix`, `hits`, `session`, `model`, `age`"
        ),
        (
            "6:15: worker.rules[1].action: there is no action 'tll', did you mean 'ttl'?; "
            "allowed are `pin`, `ttl`, `quota`, `keep-session`"
        ),
        (
            "8:7: worker.rules[2].after: must be a time such as `30s`, `10m`, `2h` or `1d`, "
            "not 'forever'"
        ),
        "10:7: worker.rules[3].max: must be a size above 0, such as `512MiB` or `2GiB`, not -5",
        "11:14: worker.rules[4].match: must hold what a page must be, such as `tenant: …`",
        "12:15: worker.rules[4]: option `max` is needed",
        "13:7: worker.rules[5]: must be a rule: `match`, `action`, and the action's options",
        (
            "14:15: worker.rules[6].match.tier: input should be 'device', 'host', 'disk', "
            "'pool-ram', 'pool-disk' or 'pool-object', not 'floppy'"
        ),
        "16:7: worker.rules[6].after: must be longer than 0, not 0",
        "19:7: worker.rules[8]: can never match: the rule in line 17 takes all that it is about",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker: {rules: lru}", "must be a list of rules"),
        ("worker: {rules: [{match: {tier: disk}}]}", "`action` is missing"),
        ("worker: {rules: [{action: [pin]}]}", "there is no action ['pin']"),
        ("worker: {rule: []}", "unknown key 'rule', did you mean 'rules'?"),
        ("cluster: {rules: []}", "unknown key 'rules'"),
        (f"worker: {{rules: [{'{action: pin},' * 101}]}}", "at most 100 are allowed"),
    ],
)
def test_a_bad_list_of_rules_is_told(text: str, said: str) -> None:
    assert said in "\n".join(problems(text))


def test_the_schema_takes_what_the_loader_takes() -> None:
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(textwrap.dedent(GOOD)), schema)


@pytest.mark.parametrize(
    "text",
    [
        "worker: {retention: lruu}",
        "worker: {retention: {policy: lfu, half_life: -1}}",
        "worker: {rules: [{action: ttl}]}",
        "worker: {rules: [{action: ttl, after: forever}]}",
        "worker: {rules: [{action: pin, match: {tier: floppy}}]}",
        "cluster: {routing: {policy: cost, weight: 3}}",
        "wroker: {}",
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(text: str) -> None:
    assert problems(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), policy_schema())

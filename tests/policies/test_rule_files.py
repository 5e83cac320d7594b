"""Rules in policy files, and the schema that editors check them with."""

import textwrap
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies
from pie.policies.rules import KeepSession, PersistPrefix, Pin, Quota, Ruled, Ttl
from pie.policies.schema import policy_schema
from pie.policies.tag_warnings import unknown_tenants

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
        - match: {prefix: desk}
          action: persist-prefix
        - match: {prefix: "%s"}
          action: keep-session
          keep: 1h
        - action: quota
          max: 1048576
    cluster:
      routing: cost
    prefixes:
      desk: {system: You are the desk.}
      tools: {tokens: [1, 2, 3]}
    """ % ("ab" * 32)


def problems(text: str) -> list[str]:
    with pytest.raises(PolicyFileError) as caught:
        load_policies(textwrap.dedent(text).lstrip("\n"), name="p.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_rules_are_read_in_order() -> None:
    policies = load_policies(textwrap.dedent(GOOD), name="p.yaml")
    assert [rule.action for rule in policies.rules] == [
        Pin(max=2 << 30),
        Ttl(after=12 * 3600.0),
        PersistPrefix(),
        KeepSession(keep=3600.0),
        Quota(max=1 << 20),
    ]
    assert len(policies.prefixes) == 2
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
            "3:23: worker.rules[0].match.prefix: there is no prefix 'ab'; it is a name from "
            "`prefixes` or a page's key of 64 hexadecimal digits"
        ),
        "5:15: worker.rules[1].match.hits: input should be greater than or equal to 1, not -1",
        (
            "5:25: worker.rules[1].match.teir: no such option, did you mean 'tier'?; "
            "allowed are `tenant`, `tier`, `part`, `prefix`, `hits`, `session`, `model`, `age`"
        ),
        (
            "6:15: worker.rules[1].action: there is no action 'tll', did you mean 'ttl'?; "
            "allowed are `pin`, `ttl`, `quota`, `keep-session`, `persist-prefix`"
        ),
        (
            "8:7: worker.rules[2].after: must be a time such as `30s`, `10m`, `2h` or `1d`, "
            "not 'forever'"
        ),
        "9:7: worker.rules[3]: can never match: the rule in line 7 takes all that it is about",
        "10:7: worker.rules[3].max: must be a size above 0, such as `512MiB` or `2GiB`, not -5",
        "11:14: worker.rules[4].match: must hold what a page must be, such as `tenant: …`",
        "12:15: worker.rules[4]: option `max` is needed",
        "13:7: worker.rules[5]: must be a rule: `match`, `action`, and the action's options",
        (
            "14:15: worker.rules[6].match.tier: input should be 'device', 'host', 'disk', "
            "'pool-ram', 'pool-disk' or 'pool-object', not 'floppy'"
        ),
        "16:7: worker.rules[6].after: must be longer than 0 and at most 10000d, not 0",
        "17:7: worker.rules[7]: can never match: the rule in line 7 takes all that it is about",
        "19:7: worker.rules[8]: can never match: the rule in line 7 takes all that it is about",
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


def test_everything_wrong_with_prefixes_is_told_at_once() -> None:
    assert problems(
        """
        prefixes:
          9lives: {text: Meow}
          empty: {}
          both: {text: a, key: "00"}
          short: {key: "00"}
          wrong: {tokens: [-1], txt: a}
          flat: 7
        worker:
          rules:
            - match: {prefix: desk}
              action: persist-prefix
        """
    ) == [
        (
            "2:3: prefixes.9lives: a name is letters, digits, `_` and `-`, at most 63, and begins "
            "with a letter"
        ),
        ("3:3: prefixes.empty: give exactly one of `text`, `system`, `tokens` and `key`"),
        ("4:3: prefixes.both: give exactly one of `text`, `system`, `tokens` and `key`"),
        ("5:11: prefixes.short.key: `key` must be 64 hexadecimal digits"),
        "6:11: prefixes.wrong.tokens: input should be greater than or equal to 0, not -1",
        (
            "6:25: prefixes.wrong.txt: no such option, did you mean 'text'?; allowed are `text`, "
            "`system`, `tokens`, `key`"
        ),
        "7:9: prefixes.flat: must hold one of `text`, `system`, `tokens` and `key`",
        (
            "10:23: worker.rules[0].match.prefix: there is no prefix 'desk'; it is a name from "
            "`prefixes` or a page's key of 64 hexadecimal digits"
        ),
    ]


def test_the_schema_takes_what_the_loader_takes() -> None:
    schema = policy_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(textwrap.dedent(GOOD)), schema)
    scale = "cluster: {scale: {policy: by-load, max: 4, running: 32, fall_after: 10m}}"
    load_policies(scale, name="p.yaml")
    jsonschema.validate(yaml.safe_load(scale), schema)


@pytest.mark.parametrize(
    "text",
    [
        "worker: {retention: lruu}",
        "worker: {retention: {policy: lfu, half_life: -1}}",
        "worker: {rules: [{action: ttl}]}",
        "worker: {rules: [{action: ttl, after: forever}]}",
        "worker: {rules: [{action: pin, match: {tier: floppy}}]}",
        "cluster: {routing: {policy: cost, weight: 3}}",
        "cluster: {scale: {policy: by-load, max: 0}}",
        "cluster: {scale: drain}",
        "wroker: {}",
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(text: str) -> None:
    assert problems(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), policy_schema())


def test_a_rule_is_never_reached_also_where_the_earlier_one_is_wrong_itself() -> None:
    first, second = problems(
        """
        worker:
          rules:
            - match: {tier: disk}
              action: ttl
              after: forever
            - match: {tier: disk, hits: 3}
              action: pin
        """
    )
    assert first.startswith("5:7: worker.rules[0].after: must be a time such as `30s`")
    assert second == (
        "6:7: worker.rules[1]: can never match: the rule in line 3 takes all that it is about"
    )


@pytest.mark.parametrize(
    ("rules", "never"),
    [
        ("{action: keep-session}, {action: quota, max: 1GiB}", []),
        ("{action: quota, max: 1GiB}, {match: {tenant: ab}, action: pin}", []),
        ("{action: quota, max: 1GiB}, {action: ttl, after: 1h}, {action: pin}", [2]),
        (
            (
                "{match: {tenant: '*'}, action: quota, max: 1}, {match: {session: '?*'}, action: pin}, "
                "{match: {tenant: ab, session: '8*'}, action: quota, max: 2}, "
                "{match: {session: '8*'}, action: keep-session}"
            ),
            [2, 3],
        ),
        ("{action: quota, max: -1}, {action: quota, max: 1}", [1]),
        ("{action: quta, max: 1}, {action: quota, max: 1}", []),
    ],
)
def test_quotas_take_pages_from_quotas_and_other_rules_from_others(
    rules: str, never: list[int]
) -> None:
    try:
        load_policies(f"worker: {{rules: [{rules}]}}", name="p")
        told: list[str] = []
    except PolicyFileError as error:
        told = [one.path for one in error.problems if "can never match" in one.message]
    assert told == [f"worker.rules[{number}]" for number in never]


def test_a_policy_speaks_of_its_options_also_where_another_is_unknown() -> None:
    first, second = problems("cluster: {routing: {policy: cost, miss_weight: -1, foo: 2}}")
    assert first.endswith("miss_weight: input should be greater than or equal to 0, not -1")
    assert second.startswith("1:52: cluster.routing.foo: no such option")


@pytest.mark.parametrize("match", ["{tier: []}", "{part: []}"])
def test_a_rule_about_nothing_is_refused(match: str) -> None:
    (only,) = problems(f"worker: {{rules: [{{match: {match}, action: pin}}]}}")
    assert "at least 1 item" in only


@pytest.mark.parametrize(
    ("match", "warned"),
    [
        ("tenant: acme", True),
        ("tenant: ''", False),
        ("tenant: 8f2c*", False),
        ("tenant: 0123456789abcdef", False),
        ("tenant: 0123456789abcde", True),
        ("tenant: 0123456789abcdeff", True),
        ("tenant: 8F2C*", True),
        ("tenant: '[89]*'", False),
        ("tenant: '[xyz]*'", True),
        ("tenant: '[!0-9a-f]*'", True),
        ("session: '?*'", False),
        ("session: '*@*'", True),
        ("session: '????????????????'", False),
        ("session: '?????????????????'", True),
        ("model: smollm2", True),
        ("model: ab*", False),
        (f"model: {'ab' * 32}", False),
        ("hits: 3", False),
    ],
)
def test_a_pattern_that_no_tag_is_like_is_warned_of(match: str, warned: bool) -> None:
    policies = load_policies(f"worker: {{rules: [{{match: {{{match}}}, action: pin}}]}}", name="p")
    assert bool(policies.warnings) is warned
    if warned:
        assert str(policies.warnings[0]).startswith("1:27: worker.rules[0].match.")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "cluster: {migration: [{policy: expire, after: 1d, tenant: acme}]}",
            "1:51: cluster.migration[0].tenant: ",
        ),
        (
            "cluster: {migration: [follow-session, {policy: expire, after: 1d, session: '*@*'}]}",
            "1:67: cluster.migration[1].session: ",
        ),
        (
            "cluster: {migration: [{policy: replicate, copies: 2, model: smollm2}]}",
            "1:54: cluster.migration[0].model: ",
        ),
        (
            "cluster: {replication: {policy: replicate, copies: 2, tenant: acme}}",
            "1:55: cluster.replication.tenant: ",
        ),
    ],
)
def test_a_pattern_of_a_cluster_policy_is_warned_of_as_one_of_a_rule_is(
    text: str, told: str
) -> None:
    (warning,) = load_policies(text, name="p").warnings
    assert str(warning).startswith(f"{told}no page is meant")


def test_a_tenant_that_is_not_known_is_found_wherever_it_is_selected() -> None:
    policies = load_policies(
        """
        worker: {rules: [{match: {tenant: 0123456789abcdef}, action: pin}]}
        cluster:
          replication: {policy: replicate, copies: 2, tenant: "0123*"}
          migration:
            - {policy: expire, after: 1d, tenant: "aa*"}
            - {policy: expire, after: 2d, tenant: ""}
            - {policy: replicate, copies: 2, tenant: "01*"}
        """,
        name="p",
    )
    assert not policies.warnings
    assert [one.path for one in unknown_tenants(policies.patterns, {"aabbccddeeff0011"})] == [
        "worker.rules[0].match.tenant",
        "cluster.replication.tenant",
        "cluster.migration[2].tenant",
    ]


def test_a_class_of_a_users_own_is_warned_of_where_its_annotations_say_what_it_selects_by(
    tmp_path: Path,
) -> None:
    (tmp_path / "choosy.py").write_text(
        "from pie.policies.units import TenantPattern\n"
        "class Choosy:\n"
        "    def __init__(self, whose: TenantPattern | None = None, *, tenant: str = '') -> None: ...\n"
        "    def decide(self, view): return []\n"
    )
    text = "cluster: {replication: {policy: 'choosy:Choosy', whose: acme, tenant: acme}}"
    (warning,) = load_policies(text, name="p", folder=tmp_path).warnings
    assert warning.path == "cluster.replication.whose"


@pytest.mark.parametrize(
    ("prefix", "tier", "warned"),
    [
        ("system: You are the desk.", "[pool-ram, pool-disk]", True),
        ("text: You are the desk.", "[host, pool-object]", True),
        ("tokens: [1, 2]", "pool-ram", False),
        ("system: You are the desk.", "host", False),
    ],
)
def test_a_prefix_whose_tokens_no_pool_node_knows_is_warned_of(
    prefix: str, tier: str, warned: bool
) -> None:
    text = (
        f"prefixes: {{desk: {{{prefix}}}}}\n"
        f"worker: {{rules: [{{action: pin, match: {{tier: {tier}, prefix: desk}}}}]}}"
    )
    told = [str(one) for one in load_policies(text, name="p").warnings]
    assert bool(told) is warned
    assert all(
        "worker.rules[0].match.prefix: no page at a pool node is meant" in one for one in told
    )

"""Selectors of a policy file, held against a trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from pie.page.key import page_keys
from pie.policies.cluster_policy import ClusterView, Order
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySpec
from pie.policies.prefixes import NamedPages
from pie.router.prefix import Prefix
from pie.simulator.cluster import SimulatedCluster
from pie.simulator.command import SimulateOptions, simulate
from pie.simulator.meant import MODEL, Meant, meant_in
from pie.simulator.ordered import orders_told
from pie.simulator.trace import Trace, read_trace
from tests.simulator.parts import PAGE, spec
from tests.simulator.test_recorded import PAGE as RECORDED, ROOT, SHARED, recorded, row

HEAD = "arrival_s,prompt_tokens,output_tokens,session,prefix,prefix_tokens,tenant\n"
TABLE = HEAD + "".join(
    f"{at * 0.2},{40 + at},4,s{at % 3},{'tools' if at % 2 else ''},20,{'acme' if at % 3 else ''}\n"
    for at in range(30)
)


def table(tmp_path: Path) -> Trace:
    file = tmp_path / "trace.csv"
    file.write_text(TABLE)
    return read_trace(file)


def meant(trace: Trace, text: str, page_tokens: int = PAGE) -> Meant:
    return meant_in(trace, load_policies(text, name="test"), page_tokens)


def test_each_selector_that_nothing_is_like_is_warned_of_with_what_there_is(tmp_path: Path) -> None:
    trace = table(tmp_path)
    found = meant(
        trace,
        """worker:
  rules:
    - {match: {session: 8f2c*}, action: pin}
    - {match: {session: s1}, action: pin}
    - {match: {tenant: acme}, action: pin}
    - {match: {tenant: ""}, action: pin}
    - {match: {model: "0*"}, action: pin}
cluster:
  migration: [{policy: replicate, tenant: zeta, copies: 2}]
""",
    )
    assert found.warnings == (
        (
            "line 3, worker.rules[0].match.session: '8f2c*' selects nothing: no session of the trace is like it; "
            "there are s0, s1, s2"
        ),
        "line 7, worker.rules[4].match.model: '0*' selects nothing: the trace does not say which model it is of",
        (
            "line 9, cluster.migration[0].tenant: 'zeta' selects nothing: no tenant of the trace is like it; "
            "there are acme"
        ),
    )


def test_tenants_of_a_heldshare_no_pages_and_have_their_quotas(tmp_path: Path) -> None:
    trace = table(tmp_path)
    policies = meant(trace, "worker: {rules: [{match: {tenant: acme}, action: quota, max: 1GB}]}")
    simulated = SimulatedCluster(spec(workers=1, pages=400), policies.policies)
    simulated.run_open(trace.requests)
    simulated.check()
    held = simulated.workers[0].engine.table
    assert {page.tenant_tag for page in held.frozen_pages()} == {"", "acme"}
    tools = next(one for one in trace.requests if one.runs[0][1] == 20)
    firsts = [Prefix(tools.tokens(), salt).keys(MODEL, PAGE)[0] for salt in (None, "acme")]
    slots = [held.slot_of(key) for key in firsts]
    assert None not in slots
    assert [held.frozen(slot).tenant_tag for slot in slots if slot is not None] == ["", "acme"]


def test_a_prefix_that_the_heldnames_is_the_one_of_that_name_however_it_is_given(
    tmp_path: Path,
) -> None:
    trace = table(tmp_path)
    found = meant(
        trace,
        """prefixes: {tools: {system: Use tools.}, other: {text: Other.}, ids: {tokens: [1, 2]}}
worker:
  rules:
    - {match: {prefix: tools}, action: pin}
    - {match: {prefix: other}, action: pin}
cluster: {migration: [{policy: replicate, prefix: ids, copies: 2}]}
""",
    )
    tools = next(one for one in trace.requests if one.runs[0][1] == 20)
    pages = page_keys(MODEL, tools.tokens()[:20], PAGE)
    assert found.policies.prefixes.by_name() == {
        "tools": NamedPages(frozenset(pages)),
        "other": NamedPages(frozenset()),
        "ids": NamedPages(frozenset()),
    }
    simulated = SimulatedCluster(spec(workers=1), found.policies, unknown=found.unknown)
    simulated.run_open(trace.requests)
    unknown = "is not known, so that it"
    assert simulated.not_simulated == [
        (
            f"replicate: which pages are those of the prefix `ids` {unknown} does nothing about it: "
            "the trace does not say whose keys its pages have"
        ),
        (
            f"pin: which pages are those of the prefix `other` {unknown} keeps none of them: "
            "a trace has no text, and no prefix of this name"
        ),
    ]


def test_tokens_and_keys_of_a_cluster_are_found_in_what_it_recorded(tmp_path: Path) -> None:
    tail = list(range(200, 220))
    trace = recorded(tmp_path, row(0, [*SHARED, *tail]), row(1, [*SHARED, *range(90, 110)]))
    last = page_keys(ROOT, SHARED, RECORDED)[-1].hex()
    missing = "ab" * 32
    found = meant(
        trace,
        f"""prefixes:
  ids: {{tokens: {[*SHARED, 999, 998]}}}
  last: {{key: {last}}}
  long: {{key: {missing}}}
worker:
  rules:
    - {{match: {{prefix: {last}}}, action: pin}}
    - {{match: {{prefix: {missing}}}, action: pin}}
    - {{match: {{model: "{ROOT.hex()[:4]}*"}}, action: pin}}
cluster:
  migration:
    - {{policy: replicate, prefix: {last}, copies: 2}}
    - {{policy: replicate, prefix: {missing}, copies: 3}}
""",
        RECORDED,
    )
    here = page_keys(ROOT, trace.requests[0].tokens(), RECORDED)[:3]
    assert found.policies.prefixes.by_name()["ids"].pages == set(here)
    assert found.policies.prefixes.by_name()["last"] == NamedPages(frozenset(here[2:]), here[2])
    assert found.unknown == {"long": "no request of the trace has the page with this key"}
    assert found.policies.rules[0].selector.prefix == here[2]
    assert found.policies.migration[0].options["prefix"] == here[2].hex()
    assert [one.split(":")[0] for one in found.warnings] == ["pin", "replicate"]


def test_pages_of_another_size_are_those_up_to_where_the_prefix_ends(tmp_path: Path) -> None:
    trace = recorded(tmp_path, row(0, [*SHARED, *range(200, 260)]))
    last = page_keys(ROOT, SHARED, RECORDED)[-1].hex()
    text = f"prefixes: {{last: {{key: {last}}}}}"
    whole = page_keys(ROOT, trace.requests[0].tokens(), 32)
    assert meant(trace, text, 32).policies.prefixes.by_name()["last"].last == whole[0]
    assert meant(trace, text, 64).unknown == {"last": "it is shorter than a page of 64 tokens here"}


def test_a_key_is_a_hash_of_a_trace_of_mooncakes(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [4, 5, 6]}\n'
    )
    trace = read_trace(file)
    found = meant(trace, f"prefixes: {{two: {{key: '{5:064x}'}}}}", 512)
    second = page_keys(MODEL, trace.requests[0].tokens(), 512)[1]
    assert found.policies.prefixes.by_name()["two"].last == second
    assert found.unknown == {}


class Looks:
    """Notes what it is shown of named prefixes."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def decide(self, view: ClusterView) -> Iterable[Order]:
        self.seen.append(dict(view.prefixes))
        return ()


def test_cluster_policies_are_shown_named_prefixes(tmp_path: Path) -> None:
    trace = table(tmp_path)
    found = meant(trace, "prefixes: {tools: {text: Tools.}}")
    policy = Looks()
    looking = PolicySpec("looks", lambda: policy)  # type: ignore[arg-type]
    simulated = SimulatedCluster(spec(), replace(found.policies, replication=looking))
    simulated.run_open(trace.requests)
    assert policy.seen
    assert all(one == found.policies.prefixes.by_name() for one in policy.seen)


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_a_pinned_prefix_stays_where_others_leave(tmp_path: Path, tenant: str) -> None:
    rows = [f"0,40,4,,tools,36,{tenant}", *(f"{at},44,4,,,," for at in range(1, 40))]
    rows.append(f"50,40,4,,tools,36,{tenant}")
    (tmp_path / "trace.csv").write_text(HEAD + "\n".join(rows))
    pinned = tmp_path / "pinned.yaml"
    pinned.write_text(
        "prefixes: {tools: {system: Use tools.}}\n"
        "worker: {rules: [{match: {prefix: tools}, action: pin}, {match: {session: x}, action: pin}]}"
    )
    warned: list[str] = []
    options = SimulateOptions(tmp_path / "trace.csv", [None, pinned], spec(workers=1, pages=40))
    usual, kept = simulate(options, lambda _: None, warned.append)
    assert usual.hit_rate == 0.0
    assert kept.hit_rate > 0.0
    said = "line 2, worker.rules[1].match.session: 'x' selects nothing: no request of the trace names a session"
    assert warned == [f"pinned: {said}"]
    assert kept.warnings == [said]
    assert orders_told([kept]) == []

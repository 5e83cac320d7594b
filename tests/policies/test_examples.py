"""The policies in `examples/policies` do what they say, and are found where they are installed."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pie.page.events import Part, PlaceId, PlaceKind, Tier
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterManager
from pie.policies.cluster_policy import ClusterView, GroupView, PlaceView
from pie.policies.errors import PolicyFileError
from pie.policies.loader import load_policies, load_policy_file
from pie.policies.manager import RetentionManager
from pie.policies.policy_set import PolicySet
from pie.policies.retention import PageView
from pie.policies.routing import RequestView, WorkerView
from tests.policies.pages import Held, round_of

EXAMPLES = Path(__file__).parents[2] / "examples" / "policies"


def policies(text: str) -> PolicySet:
    return load_policies(text, name="policies.yaml", folder=EXAMPLES)


def page(number: int, tenant: str = "") -> PageView:
    return PageView(
        PageKey(bytes([number]) * 32), b"", 0, Part.FULL, Tier.DEVICE, bytes=10, tenant_tag=tenant
    )


def order(manager: RetentionManager, bytes_needed: int = 1_000) -> list[int]:
    manager.check()
    return [key[0] for key, _ in manager.victims(bytes_needed, now_s=9.0)]


def test_the_file_beside_them_is_good() -> None:
    found = load_policy_file(EXAMPLES / "policies.yaml")
    assert found.retention.options == {"keep_pages": 64}
    assert found.routing.options == {"patience_ms": 500}
    assert found.replication.name == "copies_by_key:CopiesByKey"
    assert found.scale.options == {"spare": 2}


def test_newest_first_keeps_the_earliest() -> None:
    manager = RetentionManager(
        policies("worker: {retention: newest_first:NewestFirst}").new_retention()
    )
    for number in range(4):
        manager.stored(page(number), float(number))
    manager.removed(page(3).key, Part.FULL)
    manager.hit(page(0).key, Part.FULL, 5.0)
    assert order(manager, 20) == [2, 1]
    assert manager.counts.fallbacks == manager.counts.failures == 0


def test_the_tenant_that_has_most_gives_first() -> None:
    manager = RetentionManager(
        policies("worker: {retention: fair_tenants:FairTenants}").new_retention()
    )
    for number, tenant in enumerate("abbbc"):
        manager.stored(page(number, tenant), float(number))
    manager.hit(page(1).key, Part.FULL, 5.0)
    assert order(manager, 20) == [2, 3]
    assert sorted(order(manager)) == [0, 1, 2, 3, 4]
    manager.removed(page(2).key, Part.FULL)
    manager.removed(page(3).key, Part.FULL)
    manager.removed(page(1).key, Part.FULL)
    assert order(manager) == [0, 4]
    assert manager.counts.fallbacks == manager.counts.failures == 0


def test_a_tenant_gives_the_end_of_a_sequence_first() -> None:
    policy = policies("worker: {retention: fair_tenants:FairTenants}").new_retention()
    for number in range(4):
        before = page(number - 1).key if number else b""
        policy.stored(replace(page(number, "a"), parent=before), 0.0)
    assert [key[0] for key, _ in policy.victims(1, 0.0)] == [3, 2, 1, 0]


def test_a_tenant_that_has_no_page_any_more_is_forgotten() -> None:
    policy = policies("worker: {retention: fair_tenants:FairTenants}").new_retention()
    for number in range(40):
        policy.stored(page(number, f"tenant {number}"), 0.0)
        policy.removed(page(number).key, Part.FULL)
    assert not any(vars(policy).values())


def test_what_was_used_often_stays_as_if_it_had_been_used_later() -> None:
    manager = RetentionManager(
        policies(
            "worker: {retention: {policy: 'used_often:UsedOften', doubling_s: 3}}"
        ).new_retention()
    )
    for number in range(4):
        manager.stored(page(number), float(number))
    manager.hit(page(0).key, Part.FULL, 0.5)
    assert order(manager) == [1, 2, 3, 0]
    manager.hit(page(1).key, Part.FULL, 3.0)
    assert order(manager) == [2, 3, 0, 1]
    assert manager.counts.fallbacks == manager.counts.failures == 0


def worker(name: str, queued: int = 0, device: int = 0, *, session: bool = False) -> WorkerView:
    return WorkerView(PlaceId(name), device, queued_tokens=queued, has_session=session)


def test_a_conversation_stays_unless_the_wait_is_too_long() -> None:
    routing = policies(
        "cluster: {routing: {policy: 'patient_sessions:PatientSessions', patience_ms: 1000}}"
    ).new_routing()
    request = RequestView("r", 100, 16)
    assert routing.choose(request, [worker("a", 900, session=True), worker("b")]).place == "a"
    assert routing.choose(request, [worker("a", 1_100, session=True), worker("b")]).place == "b"
    assert routing.choose(request, [worker("a"), worker("b", 10, device=64)]).place == "b"
    assert routing.choose(request, [worker("a", 9_000), worker("b", 8_000)]).place == "b"


def test_chosen_groups_have_their_copies_and_others_no_more() -> None:
    chosen, other = PageKey(b"\x01" * 32), PageKey(b"\x02" * 32)
    (_, replication), *_ = policies(
        f"cluster: {{replication: {{policy: 'copies_by_key:CopiesByKey', groups: ['{chosen.hex()}']}}}}"
    ).new_cluster()
    manager = ClusterManager([("copies", replication)])
    view = ClusterView(3, 1, [GroupView(other, 9.0, 3)], 0.0)
    decision = round_of(manager, view, {other: 3}, Held())
    assert decision.table == {chosen: 2}
    assert [event.action for event in decision.events] == ["raise", "lower"]
    view = ClusterView(3, 1, [GroupView(chosen, 0.0, 2)], 1.0)
    again = round_of(manager, view, decision.table, Held())
    assert (again.table, again.events) == (decision.table, [])


def test_spare_workers_are_wanted_beside_the_busy_ones() -> None:
    (_, scale) = policies("cluster: {scale: 'spare_workers:SpareWorkers'}").new_cluster()[-1]
    places = [
        PlaceView(PlaceId(name), PlaceKind.WORKER, model=model, running=running)
        for name, model, running in (("a", "m", 2), ("b", "m", 0), ("c", "n", 0))
    ]
    manager = ClusterManager([("spare", scale)])
    decision = round_of(manager, ClusterView(0, 1, (), 0.0, places), {}, Held())
    assert {model: one.workers for model, one in decision.wanted.items()} == {"m": 2, "n": 1}


def test_the_readme_has_a_line_for_each_of_them_with_its_kind() -> None:
    told = re.findall(
        r"^\| `([\w-]+)` \| (\w+) \|", (EXAMPLES / "README.md").read_text(), re.MULTILINE
    )
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    assert sorted(told) == sorted(
        (name, group.removeprefix("pie.policies."))
        for group, names in project["entry-points"].items()
        for name in names
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples as `pip install` leaves them, without asking pip."""
    project = tomllib.loads((EXAMPLES / "pyproject.toml").read_text())["project"]
    folder = tmp_path / "pie_example_policies-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(EXAMPLES), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.usefixtures("installed")
def test_installed_policies_are_named_as_built_ins_are() -> None:
    found = load_policies(
        """
        worker: {retention: {policy: newest-first, keep_pages: 3}}
        cluster: {routing: patient-sessions, replication: {policy: copies-by-key, groups: []}, scale: spare-workers}
        """,
        name="policies.yaml",
    )
    assert found.retention.options == {"keep_pages": 3}
    (_, replication), *_, (_, scale) = found.new_cluster()
    for policy in (found.new_retention(), found.new_routing(), replication, scale):
        assert type(policy).__module__ in {
            "newest_first",
            "patient_sessions",
            "copies_by_key",
            "spare_workers",
        }


@pytest.mark.usefixtures("installed")
def test_a_name_that_is_nearly_an_installed_one_is_told() -> None:
    with pytest.raises(Exception, match="did you mean 'newest-first'") as caught:
        load_policies("worker: {retention: newest-frist}", name="policies.yaml")
    assert "`fair-tenants`" in str(caught.value)


@pytest.mark.parametrize(
    ("half", "option"),
    [
        ("worker: {retention: {policy: newest_first:NewestFirst", "keep_pages: -1"),
        ("worker: {retention: {policy: used_often:UsedOften", "doubling_s: 0"),
        ("cluster: {routing: {policy: patient_sessions:PatientSessions", "patience_ms: .nan"),
        ("cluster: {replication: {policy: copies_by_key:CopiesByKey", "groups: [zz]"),
        ("cluster: {scale: {policy: spare_workers:SpareWorkers", "spare: -1"),
    ],
)
def test_an_option_that_cannot_be_is_told_at_its_place(half: str, option: str) -> None:
    with pytest.raises(PolicyFileError) as caught:
        policies(f"{half},\n{option}}}}}")
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (2, 1)

"""The named routing policies: each by its own rule, and all by what holds for any."""

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.loader import load_policies
from pie.policies.registry import BUILTIN, PolicyKind
from pie.policies.routing import RequestView, RoutingPolicy, WorkerView
from pie.policies.routing_affinity import ConsistentHashRouting, PrefixAffinityRouting
from pie.policies.routing_cost import CostRouting
from pie.policies.routing_plain import LeastLoadedRouting, PowerOfTwoRouting, RoundRobinRouting
from pie.policies.routing_weighted import WeightedRouting

NAMES = [f"w{number}" for number in range(4)]


def request(name: str = "r", *, session: str | None = None, page: int | None = None) -> RequestView:
    keys = [] if page is None else [PageKey(bytes([page]) * 32)]
    return RequestView(name, 1_000, 16, session, keys)


def worker(name: str, held: int = 0, **fields: object) -> WorkerView:
    return WorkerView(PlaceId(name), held, **fields)  # type: ignore[arg-type]


def routing(name: str) -> RoutingPolicy:
    return load_policies(f"cluster: {{routing: {name}}}", name="f").new_routing()


@pytest.mark.parametrize("name", BUILTIN[PolicyKind.ROUTING])
@given(
    workers=st.lists(
        st.builds(
            WorkerView,
            place=st.sampled_from(NAMES).map(PlaceId),
            device_tokens=st.integers(0, 1_000),
            queued_tokens=st.integers(0, 100_000),
            waiting=st.integers(0, 100),
            running=st.integers(0, 100),
            prefill_tokens_per_s=st.floats(),
            free_share=st.floats(0, 1),
            has_session=st.booleans(),
        ),
        min_size=1,
        unique_by=lambda view: view.place,
    ),
    session=st.none() | st.text(),
)
def test_every_policy_names_a_candidate(
    name: str, workers: list[WorkerView], session: str | None
) -> None:
    chosen = routing(name).choose(request(session=session), workers).place
    assert chosen in {view.place for view in workers}


@pytest.mark.parametrize("name", sorted(set(BUILTIN[PolicyKind.ROUTING]) - {"consistent-hash"}))
def test_equals_share_requests_about_evenly(name: str) -> None:
    policy = routing(name)
    workers = [worker(place) for place in NAMES]
    chosen = Counter[str](policy.choose(request(f"r{at}"), workers).place for at in range(800))
    assert min(chosen.values()) > 150, chosen


def test_round_robin_takes_each_in_turn_and_passes_over_who_is_gone() -> None:
    policy = RoundRobinRouting()
    every = [worker(name) for name in reversed(NAMES)]
    assert [policy.choose(request(), every).place for _ in range(5)] == [*NAMES, "w0"]
    without = [view for view in every if view.place != "w1"]
    assert [policy.choose(request(), without).place for _ in range(2)] == ["w2", "w3"]


def test_least_loaded_goes_by_waiting_time_then_by_requests() -> None:
    policy = LeastLoadedRouting()
    slow = worker("w0", queued_tokens=100, prefill_tokens_per_s=10.0)
    fast = worker("w1", queued_tokens=500, prefill_tokens_per_s=1_000.0)
    assert policy.choose(request(), [slow, fast]).place == "w1"
    assert (
        policy.choose(request(), [worker("w0", running=2), worker("w1", waiting=1)]).place == "w1"
    )


def test_power_of_two_never_takes_the_busiest_of_many() -> None:
    workers = [worker(name, queued_tokens=at) for at, name in enumerate(NAMES)]
    chosen = Counter[str](
        PowerOfTwoRouting().choose(request(f"r{n}"), workers).place for n in range(400)
    )
    assert "w3" not in chosen
    assert chosen["w0"] > chosen["w1"] > chosen["w2"] > 0


def test_prefix_affinity_follows_a_long_match_however_busy() -> None:
    busy = worker("w0", 400, queued_tokens=50_000, waiting=60)
    assert PrefixAffinityRouting().choose(request(), [busy, worker("w1")]).place == "w0"


def test_prefix_affinity_sends_a_short_match_and_a_miss_by_load() -> None:
    workers = [worker("w0", 200, waiting=2), worker("w1", waiting=1)]
    assert PrefixAffinityRouting().choose(request(), workers).place == "w1"
    assert PrefixAffinityRouting(threshold=0.2).choose(request(), workers).place == "w0"


def test_prefix_affinity_goes_by_load_once_requests_are_uneven() -> None:
    workers = [worker("w0", 900, waiting=66), worker("w1", waiting=1)]
    assert PrefixAffinityRouting().choose(request(), workers).place == "w1"


def test_consistent_hash_keeps_a_conversation_and_else_a_prefix_together() -> None:
    policy = ConsistentHashRouting()
    workers = [worker(name) for name in NAMES]
    of_session = {
        policy.choose(request(f"r{n}", session="s", page=n), workers).place for n in range(9)
    }
    of_prefix = {policy.choose(request(f"r{n}", page=7), workers).place for n in range(9)}
    assert len(of_session) == len(of_prefix) == 1
    spread = {policy.choose(request(session=f"s{n}"), workers).place for n in range(60)}
    assert spread == set(NAMES)


def test_consistent_hash_moves_only_the_share_of_who_leaves() -> None:
    policy = ConsistentHashRouting()
    every = [worker(name) for name in NAMES]
    for number in range(60):
        before = policy.choose(request(session=f"s{number}"), every).place
        after = policy.choose(request(session=f"s{number}"), every[1:]).place
        assert before in {after, "w0"}


def test_consistent_hash_passes_on_what_is_more_than_a_share() -> None:
    policy = ConsistentHashRouting(most_load=1.25)
    loads = Counter[str]()
    for number in range(100):
        workers = [worker(name, waiting=loads[name]) for name in NAMES]
        loads[policy.choose(request(f"r{number}", session="hot"), workers).place] += 1
    assert max(loads.values()) <= 1.25 * 100 / 4 + 1


def test_weighted_adds_up_what_its_scorers_say() -> None:
    policy = WeightedRouting(scorers={"prefix": 3, "queue": 2})
    held, idle = worker("w0", 600, waiting=5), worker("w1")
    assert policy.choose(request(), [held, idle]).place == "w1"
    assert policy.choose(request(), [worker("w0", 700, waiting=5), idle]).place == "w0"
    assert (
        WeightedRouting(scorers={"session": 1})
        .choose(request(), [worker("w0"), worker("w1", has_session=True)])
        .place
        == "w1"
    )


def test_weighted_filters_leave_out_who_is_over_a_limit_unless_all_are() -> None:
    policy = WeightedRouting(filters={"max-requests": 4}, scorers={"prefix": 1})
    assert policy.choose(request(), [worker("w0", 900, waiting=5), worker("w1")]).place == "w1"
    busy = [worker("w0", 900, waiting=5), worker("w1", waiting=6)]
    assert policy.choose(request(), busy).place == "w0"


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ("prefix-affinity", "w0"),
        ("prefix-affinity, imbalance_requests: 8", "w1"),
        ("prefix-affinity, imbalance_requests: 8, imbalance_ratio: 100", "w0"),
        ("weighted", "w0"),
        ("weighted, scorers: {free-memory: 1}", "w1"),
        ("weighted, scorers: {running: 1}", "w1"),
        ("weighted, scorers: {prefix: 1}", "w0"),
        ("weighted, scorers: {prefix: 1}, filters: {least-free-memory: 0.3}", "w1"),
        ("weighted, scorers: {prefix: 1}, filters: {least-free-memory: 0.1}", "w0"),
    ],
)
def test_options_of_a_file_say_who_takes_a_request(options: str, place: str) -> None:
    holder = worker("w0", 900, running=20, free_share=0.2)
    assert routing(f"{{policy: {options}}}").choose(
        request(), [holder, worker("w1", running=1, free_share=0.4)]
    ).place == PlaceId(place)


def test_weighted_random_draws_with_the_scores_as_chances() -> None:
    policy = WeightedRouting(scorers={"prefix": 1}, picker="weighted-random")
    workers = [worker("w0", 900), worker("w1", 300), worker("w2")]
    chosen = Counter[str](policy.choose(request(f"r{n}"), workers).place for n in range(1_000))
    assert 650 < chosen["w0"] < 850
    assert chosen["w2"] == 0


def test_a_conversation_stays_where_it_was_while_another_costs_about_the_same() -> None:
    here = worker("w0", 500, has_session=True)
    assert CostRouting().choose(request(), [worker("w1", 505), here]).place == "w0"
    assert CostRouting().choose(request(), [worker("w1", 600), here]).place == "w1"
    assert CostRouting(session_share=1).choose(request(), [worker("w1", 600), here]).place == "w0"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "{policy: prefix-affinity, threshold: 2}",
            "threshold: input should be less than or equal to 1, not 2",
        ),
        (
            "{policy: consistent-hash, most_load: 0.5}",
            "most_load: input should be greater than or equal to 1",
        ),
        ("{policy: weighted, scorers: {luck: 1}}", "scorers"),
        (
            "{policy: weighted, scorers: {prefix: -1}}",
            "scorers: `prefix`: input should be greater than or equal to 0",
        ),
        ("{policy: weighted, picker: worst}", "picker"),
        ("{policy: round-robin, start: 1}", "no such option"),
        ("{policy: round-robbin}", "did you mean 'round-robin'?"),
    ],
)
def test_a_bad_option_is_told(text: str, said: str) -> None:
    with pytest.raises(Exception, match=said.replace("?", r"\?")):
        load_policies(f"cluster: {{routing: {text}}}", name="f")

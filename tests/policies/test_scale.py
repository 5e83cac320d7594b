"""How many workers a model wants: what `by-load` says, and what the manager makes of hints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings, strategies as st

from pie.page.events import PlaceId, PlaceKind
from pie.policies.by_load import ByLoad
from pie.policies.cluster_manager import ClusterManager, Decision
from pie.policies.cluster_policy import ClusterView, Order, PlaceView, Wanted, WantWorkers
from pie.policies.errors import PolicyFileError
from pie.policies.hints import KEPT_S
from pie.policies.loader import load_policies
from tests.policies.pages import Held, round_of

Loads = Sequence[tuple[int, float]]
"""Of each worker: how many requests wait, and how much of its memory is in use."""


def places(loads: Loads, model: str = "m", **fields: object) -> list[PlaceView]:
    return [
        PlaceView(
            PlaceId(f"{model}-{at}"),
            PlaceKind.WORKER,
            model=model,
            waiting=waiting,
            used_share=used,
            **fields,  # type: ignore[arg-type]
        )
        for at, (waiting, used) in enumerate(loads)
    ]


def view(
    shown: Sequence[PlaceView], now_s: float, wanted: dict[str, Wanted] | None = None
) -> ClusterView:
    return ClusterView(0, 1, (), now_s, shown, wanted=wanted or {})


def said(policy: ByLoad, shown: Sequence[PlaceView], now_s: float) -> dict[str, int]:
    orders = [one for one in policy.decide(view(shown, now_s)) if isinstance(one, WantWorkers)]
    return {one.model: one.workers for one in orders}


def prompt_policy(**options: object) -> ByLoad:
    """Return a policy that follows the load a hundredth of a second later."""
    values: dict[str, object] = {"rise_after": 0.01, "fall_after": 0.01}
    return ByLoad(**(values | options))  # type: ignore[arg-type]


def settled(policy: ByLoad, shown: Sequence[PlaceView]) -> dict[str, int]:
    """Return what a policy says once a load has lasted."""
    return [said(policy, shown, now_s) for now_s in (0.0, 1.0, 2.0)][-1]


def test_the_worst_load_says_how_many() -> None:
    assert settled(prompt_policy(waiting=2), places([(6, 0.1), (2, 0.1)])) == {"m": 4}
    assert settled(prompt_policy(busy=0.5), places([(0, 0.9), (0, 0.6)])) == {"m": 3}
    assert settled(prompt_policy(wait=1.0), places([(0, 0.0)], wait_s=2.5)) == {"m": 3}
    assert settled(prompt_policy(), places([(0, 0.0)], running=500)) == {"m": 1}
    assert settled(prompt_policy(running=100), places([(0, 0.0)], running=500)) == {"m": 5}


def test_the_reason_says_what_is_there_what_is_meant_and_which_bound_holds() -> None:
    def reason(policy: ByLoad, shown: Sequence[PlaceView]) -> str:
        return policy.wanted(shown)[1]

    assert reason(ByLoad(max=5, waiting=1), places([(3, 0.0), (3, 0.0)])) == (
        "3.0 requests wait at each of 2 workers, where 1 is meant to; `max` is 5"
    )
    assert reason(ByLoad(), places([(0, 0.96)])) == (
        "96% of memory is in use at the one worker, where 80% is meant to be"
    )
    assert reason(ByLoad(min=2), places([(0, 0.0)], wait_s=0.5)) == (
        "0.5 s of computing wait at the one worker, where 2 s are meant to; `min` is 2"
    )
    assert reason(ByLoad(running=4), places([(0, 0.0)] * 3, running=6)) == (
        "6.0 sequences run at each of 3 workers, where 4 are meant to"
    )


def test_a_little_more_or_less_than_it_is_meant_to_be_changes_nothing() -> None:
    for busy in (0.73, 0.8, 0.87):
        assert settled(prompt_policy(busy=0.8), places([(0, busy)] * 3)) == {"m": 3}
    assert settled(prompt_policy(busy=0.8), places([(0, 0.95)] * 3)) == {"m": 4}


def test_a_burst_and_a_pause_are_over_before_anything_changes() -> None:
    policy = ByLoad(rise_after=5.0, fall_after=60.0)
    calm, busy = places([(0, 0.7)]), places([(10, 0.7)])
    assert said(policy, calm, 0.0) == {"m": 1}
    assert said(policy, busy, 1.0) == {"m": 1}
    assert said(policy, busy, 5.0) == {"m": 1}
    assert said(policy, calm, 5.5) == {"m": 1}
    assert said(policy, busy, 6.0) == {"m": 1}
    assert said(policy, places([(6, 0.7)]), 8.0) == {"m": 1}
    assert said(policy, busy, 11.0) == {"m": 3}, "the least that was wanted throughout"
    assert said(policy, calm, 12.0) == {"m": 3}
    assert said(policy, calm, 71.0) == {"m": 3}
    assert said(policy, calm, 72.0) == {"m": 1}


def test_of_a_cluster_that_starts_no_fewer_are_wanted_than_come() -> None:
    policy = ByLoad(fall_after=60.0)
    idle = [(0, 0.1)]
    told = [said(policy, places(idle * up), now_s) for now_s, up in ((0.0, 1), (1.0, 2), (2.0, 4))]
    assert told == [{"m": 1}, {"m": 2}, {"m": 4}]
    assert said(policy, places(idle * 4), 61.0) == {"m": 4}, "not before the pause has lasted"
    assert said(policy, places(idle * 4), 63.0) == {"m": 1}
    assert said(policy, places(idle * 4), 64.0) == {"m": 1}


def test_models_are_told_apart_and_leaving_workers_do_not_count() -> None:
    shown = [
        *places([(8, 0.0)], "a"),
        *places([(0, 0.0)], "b"),
        PlaceView(PlaceId("a-9"), PlaceKind.WORKER, draining=True, model="a"),
        PlaceView(PlaceId("pool-0"), PlaceKind.POOL),
    ]
    assert settled(prompt_policy(), shown) == {"a": 4, "b": 1}


def test_a_model_whose_workers_are_all_gone_keeps_its_number_for_a_while() -> None:
    policy = ByLoad(rise_after=0.5, fall_after=30.0)
    assert said(policy, places([(10, 0.1)]), 0.0) == {"m": 1}
    assert said(policy, places([(10, 0.1)]), 1.0) == {"m": 5}
    assert said(policy, (), 30.9) == {"m": 5}
    assert said(policy, (), 31.0) == {}


def test_a_number_that_no_load_can_change_is_given_the_reason_of_that() -> None:
    policy = ByLoad(fall_after=30.0)

    def reasons(shown: Sequence[PlaceView], now_s: float) -> list[str]:
        return [one.reason for one in policy.decide(view(shown, now_s))]

    idle, before = places([(0, 0.1)] * 2), "so many were wanted before"
    leaving = places([(0, 0.1)] * 2, draining=True)
    assert reasons(idle, 0.0) == ["so many were up at first"]
    assert reasons(leaving, 1.0) == [f"all of its workers leave, 2 in number; {before}"]
    assert reasons((), 2.0) == [f"none of its workers is there; {before}"]
    assert reasons(idle, 3.0) == ["so many were up at first"], "they take requests again"
    # Another router has it from what was said, and says what is so now.
    said_before = {"m": Wanted(2, f"none of its workers is there; {before}", "by-load")}
    (order,) = ByLoad().decide(view(idle, 4.0, said_before))
    assert order == WantWorkers("m", 2, before)


def test_a_bound_is_the_reason_where_it_alone_wants_another_number() -> None:
    policy = ByLoad(min=3, max=4)

    def reason(workers: int) -> str:
        (order,) = policy.decide(view(places([(0, 0.1)] * workers), 0.0))
        return order.reason

    assert reason(2) == "`min` is 3, where 2 were up at first"
    assert reason(4) == "so many were up at first", "the others have come up"
    assert reason(5) == "so many were up at first"


def test_of_a_model_that_was_never_seen_to_take_requests_nothing_is_said() -> None:
    policy = ByLoad()
    assert said(policy, places([(0, 0.1)], draining=True), 0.0) == {}
    assert said(policy, places([(0, 0.1)]), 1.0) == {"m": 1}


def test_another_router_goes_on_with_what_is_in_force() -> None:
    before = {"m": Wanted(6, "it was busy", "by-load")}
    (order,) = ByLoad(fall_after=60.0).decide(view(places([(0, 0.1)]), 5.0, before))
    assert order == WantWorkers("m", 6, "it was busy")


loads = st.lists(st.tuples(st.integers(0, 1_000), st.floats(0.0, 1.0)), min_size=0, max_size=6)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.1, 20.0), loads), min_size=1, max_size=40))
def test_whatever_the_load_it_stays_in_bounds_and_changes_only_for_what_has_lasted(
    course: list[tuple[float, Loads]],
) -> None:
    lasts_s = {1: 10.0, -1: 40.0}
    policy = ByLoad(min=2, max=5, rise_after=lasts_s[1], fall_after=lasts_s[-1])
    now_s = 0.0
    before: int | None = None
    is_first = True
    began_s: dict[int, float] = {}
    """Since when more, or fewer, are wanted than is said."""
    for step_s, some in course:
        now_s += step_s
        shown = places(some)
        found = said(policy, shown, now_s).get("m")
        if found is None or not shown:
            before, began_s = found, {} if found is None else began_s
            continue
        assert 2 <= found <= 5
        asked = policy.wanted(shown)[0]
        is_first = is_first or before is None
        if before is None or (is_first and found > before and found == min(len(shown), 5)):
            # More have come up since the first look, before the load has asked for any number.
            before, began_s = found, {}
        for direction in (1, -1):
            if (asked - before) * direction > 0:
                began_s.setdefault(direction, now_s)
            else:
                began_s.pop(direction, None)
        if found != before:
            direction = 1 if found > before else -1
            assert now_s - began_s.pop(direction) >= lasts_s[direction]
            assert abs(found - before) <= abs(asked - before)
            is_first = False
        before = found


@given(loads.filter(bool))
def test_more_that_waits_never_asks_for_fewer(some: Loads) -> None:
    policy = ByLoad(max=10_000)
    more = [(waiting + 1, used) for waiting, used in some]
    assert policy.wanted(places(more))[0] >= policy.wanted(places(some))[0]


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *orders: object) -> None:
        self.orders = orders

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        return self.orders  # type: ignore[return-value]


def decided(
    manager: ClusterManager, now_s: float, wanted: dict[str, Wanted] | None = None
) -> Decision:
    return round_of(manager, view(places([(0, 0.0)]), now_s, wanted), {}, Held())


def test_a_hint_is_an_event_when_it_changes_and_the_largest_of_a_round_counts() -> None:
    few, many = Says(WantWorkers("m", 2, "few")), Says(WantWorkers("m", 5, "many"))
    manager = ClusterManager([("few", few), ("many", many)])
    decision = decided(manager, 0.0)
    assert decision.wanted == {"m": Wanted(5, "many", "many")}
    (event,) = decision.events
    assert (event.policy, event.action, event.model, event.workers) == ("many", "hint", "m", 5)
    assert decided(manager, 1.0).events == []
    many.orders = ()
    assert decided(manager, 2.0).wanted == {"m": Wanted(2, "few", "few")}


def test_a_hint_that_nobody_repeats_lapses() -> None:
    says = Says(WantWorkers("m", 3, "busy"))
    manager = ClusterManager([("says", says)])
    decided(manager, 0.0)
    says.orders = ()
    assert decided(manager, KEPT_S - 0.1).wanted.keys() == {"m"}
    decision = decided(manager, KEPT_S)
    assert decision.wanted == {}
    (event,) = decision.events
    assert (event.policy, event.action, event.model) == ("says", "lapse", "m")
    assert "no hint holds" in event.reason


def test_a_new_leader_keeps_hints_until_they_lapse() -> None:
    before = {"m": Wanted(4, "busy", "gone")}
    manager = ClusterManager([("fixed", Says())])
    assert decided(manager, 50.0, before).wanted == before
    assert decided(manager, 50.0 + KEPT_S, before).wanted == {}


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        (WantWorkers("m", -1, "r"), "a model has 0 to 10,000 workers (r)"),
        (WantWorkers("m", 10_001, "r"), "a model has 0 to 10,000 workers (r)"),
        (WantWorkers("other", 2, "r"), "there is no worker of a model other (r)"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(order: WantWorkers, reason: str) -> None:
    decision = decided(ClusterManager([("says", Says(order))]), 0.0)
    assert decision.wanted == {}
    assert [(one.action, one.reason) for one in decision.events] == [("refuse", reason)]


def test_what_is_no_hint_fails() -> None:
    for wrong in (WantWorkers("m", "3", "r"), WantWorkers(b"m", 3, "r")):  # type: ignore[arg-type]
        (event,) = decided(ClusterManager([("says", Says(wrong))]), 0.0).events
        assert (event.action, event.reason) == ("fail", "1 proposals are no orders")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("cluster: {scale: by-laod}", "did you mean 'by-load'"),
        ("cluster: {scales: by-load}", "did you mean 'scale'"),
        ("worker: {scale: by-load}", "it belongs under `cluster`"),
        ("cluster: {scale: lru}", "'lru' is a retention policy, not a scale policy"),
        ("cluster: {migration: [by-load]}", "'by-load' is a scale policy, not a migration policy"),
        ("cluster: {scale: {policy: by-load, mx: 3}}", "no such option, did you mean 'max'"),
        ("cluster: {scale: {policy: by-load, min: 0}}", "greater than or equal to 1, not 0"),
        (
            "cluster: {scale: {policy: by-load, min: 9}}",
            "min: ByLoad refuses its options: `min` is 9, more than `max`, which is 8",
        ),
        ("cluster: {scale: {policy: by-load, fall_after: soon}}", "must be a time such as"),
        ("cluster: {scale: [by-load]}", "must be a policy's name, such as `fixed`"),
    ],
)
def test_a_file_that_is_wrong_is_told_so(text: str, told: str) -> None:
    with pytest.raises(PolicyFileError) as caught:
        load_policies(text, name="policies.yaml")
    assert told in str(caught.value)

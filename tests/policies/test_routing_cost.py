"""`cost` chooses the worker that is likely to give the first token soonest."""

import math

import pytest
from hypothesis import given, strategies as st

from pie.page.events import PlaceId
from pie.policies.routing import RequestView, WorkerView
from pie.policies.routing_cost import CostRouting

REQUEST = RequestView("r", prompt_tokens=1_000, page_tokens=16)


def worker(
    name: str,
    held: int = 0,
    *,
    queued: int = 0,
    running: int = 0,
    rate: float = 1_000.0,
    loads: dict[str, int] | None = None,
    load_rates: dict[str, float] | None = None,
) -> WorkerView:
    return WorkerView(
        PlaceId(name),
        held,
        loads=loads or {},
        queued_tokens=queued,
        running=running,
        prefill_tokens_per_s=rate,
        load_tokens_per_s=load_rates or {},
    )


def chosen(*workers: WorkerView, request: RequestView = REQUEST) -> str:
    return CostRouting().choose(request, workers).place


def test_the_longest_match_wins_where_loads_are_equal() -> None:
    assert chosen(worker("a", 100), worker("b", 900), worker("c")) == "b"


def test_a_long_queue_outweighs_a_match() -> None:
    assert chosen(worker("a", 500, queued=2_499), worker("b")) == "a"
    assert chosen(worker("a", 500, queued=2_501), worker("b")) == "b"


def test_one_shared_page_does_not_chase_requests_to_a_busy_worker() -> None:
    assert chosen(worker("a", 16, queued=1_000), worker("b")) == "b"


def test_what_many_share_goes_elsewhere_once_computing_it_there_is_sooner() -> None:
    hot = RequestView("r", prompt_tokens=1_000, page_tokens=16, hot_tokens=1_000)
    workers = worker("a", 900, queued=901), worker("b")
    assert chosen(*workers, request=hot) == "b"
    assert chosen(*workers) == "a"
    partly = RequestView("r", prompt_tokens=1_000, page_tokens=16, hot_tokens=600)
    assert chosen(worker("a", 900, queued=2_000), worker("b"), request=partly) == "a"
    assert chosen(worker("a", 900, queued=2_200), worker("b"), request=partly) == "b"


def test_a_miss_goes_to_the_less_loaded() -> None:
    assert chosen(worker("a", queued=10), worker("b")) == "b"
    assert chosen(worker("a", running=3), worker("b", running=2)) == "b"


def test_a_faster_worker_is_worth_a_shorter_match() -> None:
    assert chosen(worker("slow", 500, rate=100.0), worker("fast", rate=2_000.0)) == "fast"


def test_costs_are_in_milliseconds_and_explain_the_total() -> None:
    view = worker(
        "a",
        400,
        queued=200,
        running=10,
        loads={"pool": 500},
        load_rates={"pool": 10_000.0},
    )
    cost = CostRouting(miss_weight=3.0, decode_share=0.1).cost(REQUEST, view)
    assert cost.wait_ms == pytest.approx(200)
    assert cost.load_ms == pytest.approx(50)
    assert cost.prefill_ms == pytest.approx(100)
    assert cost.decode_share_ms == pytest.approx(50)
    assert cost.total_ms == pytest.approx(200 + 50 + 3 * 100 + 50)


def test_a_load_slower_than_prefill_counts_as_missing() -> None:
    slow = worker("slow", loads={"pool": 900}, load_rates={"pool": 100.0})
    none = worker("none")
    unknown = worker("unknown", loads={"pool": 900})
    costs = [CostRouting().cost(REQUEST, view).total_ms for view in (slow, none, unknown)]
    assert len(set(costs)) == 1
    assert chosen(slow, worker("fast", loads={"pool": 900}, load_rates={"pool": 9_000.0})) == "fast"


def test_a_prompt_that_is_held_whole_costs_its_last_token() -> None:
    cost = CostRouting().cost(REQUEST, worker("a", 1_000))
    assert cost.prefill_ms == pytest.approx(1)
    more = worker("a", 400, loads={"host": 5_000}, load_rates={"host": 1e6})
    assert CostRouting().cost(REQUEST, more).prefill_ms == pytest.approx(1)


def test_equals_share_requests_and_every_router_decides_alike() -> None:
    workers = [worker(name) for name in "abcd"]
    requests = [RequestView(f"r{number}", 100, 16) for number in range(200)]
    places = [chosen(*workers, request=request) for request in requests]
    assert {name: places.count(name) > 20 for name in "abcd"} == dict.fromkeys("abcd", True)
    assert places == [chosen(*reversed(workers), request=request) for request in requests]


counts = st.integers(-5, 100_000)
rates = st.floats(allow_nan=True, allow_infinity=True)


@given(
    st.lists(
        st.builds(
            WorkerView,
            st.integers(0, 99).map(lambda number: PlaceId(f"w{number}")),
            counts,
            loads=st.dictionaries(st.sampled_from(["host", "disk", "pool"]), counts),
            queued_tokens=counts,
            running=counts,
            prefill_tokens_per_s=rates,
            load_tokens_per_s=st.dictionaries(st.sampled_from(["host", "pool"]), rates),
        ),
        min_size=1,
        unique_by=lambda view: view.place,
    ),
    st.integers(1, 100_000),
)
def test_whatever_workers_say_one_is_chosen_and_costs_are_best_first(
    workers: list[WorkerView], prompt_tokens: int
) -> None:
    request = RequestView("r", prompt_tokens, 16)
    choice = CostRouting().choose(request, workers)
    assert choice.place == choice.costs[0].place
    assert {cost.place for cost in choice.costs} == {view.place for view in workers}
    totals = [cost.total_ms for cost in choice.costs]
    assert totals == sorted(totals)
    assert all(math.isfinite(total) and total >= 0 for total in totals)
    assert choice == CostRouting().choose(request, workers[::-1])

"""A mock engine's steps: many at once come out as one after the other."""

import dataclasses

import pytest
from hypothesis import example, given, settings, strategies as st

from pie.simulator import engine as engine_module
from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError
from pie.simulator.trace import TraceRequest
from pie.wire.messages import Load
from tests.simulator.parts import PAGE, ask, cluster, spec

REQUESTS = st.builds(
    ask,
    st.integers(0, 3_000).map(lambda ms: ms / 1e3),
    st.tuples(st.integers(1, 3), st.integers(1, 40)),
    output=st.integers(1, 30),
)


def apart(trace: list[TraceRequest]) -> list[TraceRequest]:
    """Return a trace in order, and no request at the very moment of a step's end."""
    ordered = sorted(trace, key=lambda one: one.arrival_s)
    return [
        dataclasses.replace(one, arrival_s=one.arrival_s + at * 1.37e-5)
        for at, one in enumerate(ordered)
    ]


def outcomes(
    trace: list[TraceRequest], most_steps: int, step_tokens: int
) -> list[tuple[int, float, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "_MOST_STEPS", most_steps)
        simulated = cluster(spec(workers=1, step_tokens=step_tokens))
        simulated.run_open(trace)
    simulated.check()
    assert all(worker.engine.is_idle for worker in simulated.workers)
    ends = []
    for one in simulated.outcomes:
        assert one.ttft_s is not None
        assert one.ended_s is not None
        ends.append((one.cached_tokens, one.ttft_s, one.ended_s))
    return ends


@settings(max_examples=100)
@given(st.lists(REQUESTS, min_size=1, max_size=8).map(apart), st.sampled_from([64, 23, 9]))
def test_many_steps_at_once_are_the_same_as_one_after_the_other(
    trace: list[TraceRequest], step_tokens: int
) -> None:
    at_once, single = (outcomes(trace, most, step_tokens) for most in (10_000, 1))
    assert [cached for cached, _, _ in at_once] == [cached for cached, _, _ in single]
    for (_, *quick), (_, *slow) in zip(at_once, single, strict=True):
        assert quick == pytest.approx(slow, abs=1e-6)


def test_a_prompt_takes_the_time_that_the_cost_model_says() -> None:
    simulated = cluster(spec(workers=1))
    simulated.run_open([ask(0.0, (1, 50), output=5)])
    [one] = simulated.outcomes
    assert one.ttft_s == pytest.approx(0.05)
    assert one.ended_s == pytest.approx(0.05 + 4 * 0.01)
    assert one.output_tokens == 5


def test_a_request_that_comes_in_between_waits_for_one_step_not_for_many() -> None:
    simulated = cluster(spec(workers=1))
    simulated.run_open([ask(0.0, (1, 8), output=100), ask(0.5, (2, 10), output=1)])
    # One step of 10 ms at most, then its own prefill beside the other's decode.
    assert simulated.outcomes[1].ttft_s == pytest.approx(0.0155, abs=0.006)


def test_pages_are_shared_and_a_prefix_under_way_is_computed_once() -> None:
    simulated = cluster(spec(workers=1))
    simulated.run_open([ask(0.0, (1, 40)), ask(0.0, (1, 40), (2, 8)), ask(1.0, (1, 40), (3, 8))])
    assert [one.cached_tokens for one in simulated.outcomes] == [0, 40, 40]
    assert simulated.workers[0].engine.counts.prefill_tokens == 40 + 8 + 8


def test_a_full_engine_evicts_by_its_policy_and_contradicts_nobody() -> None:
    simulated = cluster(spec(workers=1, pages=16))
    simulated.run_open([ask(at / 2, (1 + at % 5, 40), output=8) for at in range(30)])
    simulated.check()
    assert simulated.workers[0].engine.table.evicted > 0
    assert all(one.output_tokens == 8 for one in simulated.outcomes)


def test_sequences_that_do_not_fit_beside_each_other_all_end() -> None:
    simulated = cluster(spec(workers=1, pages=16))
    simulated.run_open([ask(0.0, (at, 4), output=50) for at in range(1, 9)])
    simulated.check()
    assert all(one.output_tokens == 50 for one in simulated.outcomes)


def test_a_request_that_no_worker_has_room_for_is_told_before_anything_runs() -> None:
    simulated = cluster(spec(pages=4))
    with pytest.raises(
        SetupError, match=f"request 2 has 21 tokens, and a worker's 4 pages of {PAGE}"
    ):
        simulated.run_open([ask(0.0, (1, 8)), ask(0.0, (1, 17), output=4)])


def test_what_comes_to_a_full_queue_is_refused() -> None:
    simulated = cluster(spec(workers=1, max_running=1, step_tokens=64, max_waiting=1))
    simulated.run_open([ask(0.0, (at, 8)) for at in range(1, 5)])
    assert [one.refused for one in simulated.outcomes] == [False, False, True, True]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"pages": 0}, "pages must be from 1 to 10,000,000, not 0"),
        ({"step_tokens": 4}, "step_tokens must be at least max_running: 4 < 8"),
        ({"step_target_ms": 0.0}, "step_target_ms must be above 0"),
        ({"max_waiting": -1}, "max_waiting must be from 0 to 100,000,000, not -1"),
        ({"pages": 99_999_999_999}, "pages must be from 1 to 10,000,000, not 99,999,999,999"),
        ({"page_tokens": 1 << 70}, "page_tokens must be from 1 to 1,048,576, not 1,180,591"),
        ({"max_running": 10**9}, "max_running must be from 1 to 100,000, not 1,000,000,000"),
        ({"step_tokens": 10**9}, "step_tokens must be from 1 to 10,000,000, not 1,000,000,000"),
        ({"step_target_ms": float("inf")}, "step_target_ms must be above 0 and at most 60,000"),
        ({"step_target_ms": float("nan")}, "step_target_ms must be above 0 and at most 60,000"),
    ],
)
def test_an_engine_that_cannot_be_is_told(fields: dict[str, object], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        cluster(spec(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "model",
    [
        CostModel(prefill_tokens_per_s=0.0),
        CostModel(prefill_tokens_per_s=float("nan")),
        CostModel(decode_step_ms=-1.0),
        CostModel(decode_step_ms=0.0, decode_sequence_ms=0.0),
        CostModel(page_bytes=-1),
    ],
)
def test_a_cost_model_that_makes_no_sense_is_refused(model: CostModel) -> None:
    with pytest.raises(SetupError, match="must be"):
        model.check()


@settings(max_examples=50)
# One whose last page has just left for an answer that grows.
@example(
    [
        ask(0.0, (1, 1)),
        ask(0.0, (1, 28), output=17),
        ask(0.0, (2, 34), output=27),
        ask(0.0, (3, 12), output=1),
        ask(1.331, (3, 12), output=1),
    ],
    9,
)
# One that another's prefill leaves with one token, amid the prefill of a third.
@example([ask(0.304, (2, 28), output=1), ask(0.305, (1, 27), output=1), ask(0.323, (2, 29))], 9)
@given(st.lists(REQUESTS, min_size=1, max_size=7), st.sampled_from([64, 23, 9]))
def test_a_router_is_told_the_same_of_many_steps_at_once(
    trace: list[TraceRequest], step_tokens: int
) -> None:
    # One that decodes all the while, so that each step tells.
    decoding = ask(0.0, (9, 4), output=150)
    trace = [dataclasses.replace(one, arrival_s=one.arrival_s + 0.05) for one in trace]

    def queue(load: Load | None) -> tuple[int, ...]:
        return () if load is None else (load.waiting_tokens, load.waiting, load.running)

    def told(most_steps: int) -> list[tuple[tuple[int, ...], ...]]:
        seen: list[tuple[tuple[int, ...], ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "_MOST_STEPS", most_steps)
            simulated = cluster(spec(workers=1, step_tokens=step_tokens))
            (worker,) = simulated.workers

            def look() -> None:
                worker.tell_load()
                seen.append((queue(worker.engine.load()), queue(worker.books.load)))

            for at in range(1, 24):
                simulated.clock.at(0.0631 * at + 3.1e-6, look)
            simulated.run_open(apart([decoding, *trace]))
        return seen

    assert told(10_000) == told(1)


def test_who_comes_amid_many_steps_finds_the_pages_of_those_that_have_ended() -> None:
    def waiting_tokens(most_steps: int) -> int:
        seen: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "_MOST_STEPS", most_steps)
            simulated = cluster(spec(workers=1, step_tokens=9))
            (worker,) = simulated.workers

            def look() -> None:
                load = worker.engine.load()
                assert load is not None
                seen.append(load.waiting_tokens)

            # The first page of the long prompt is computed by the first step, and then the short one comes.
            simulated.clock.at(0.013, look)
            simulated.run_open([ask(0.0, (1, 40)), ask(0.0121, (1, PAGE))])
        return seen[0]

    assert waiting_tokens(10_000) == waiting_tokens(1)


def test_many_steps_teach_as_much_of_times_as_one_after_the_other() -> None:
    def learned(most_steps: int) -> float:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "_MOST_STEPS", most_steps)
            simulated = cluster(spec(workers=1))
            simulated.run_open([ask(0.0, (1, 4), output=50)])
        load = simulated.workers[0].engine.load()
        assert load is not None
        return load.step_ms

    assert learned(10_000) == learned(1)

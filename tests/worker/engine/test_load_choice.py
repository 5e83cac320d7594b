from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pie.worker.load_choice import (
    LoadChoice,
    Loaded,
    LoadTier,
    Run,
    chosen_pages,
    with_outcome,
)
from pie.worker.load_times import LoadTimes
from pie.worker.rates import Rate

PAGE = 10
COMPUTE = 1000.0


def rate(per_s: float) -> Rate:
    seen = Rate(0.0)
    seen.saw(1000, 1000 / per_s)
    return seen


def times(per_s: float) -> LoadTimes:
    seen = LoadTimes()
    for _ in range(2):
        seen.saw(1000, 1000 / per_s)
    return seen


def choice(**rates: float) -> LoadChoice:
    made = LoadChoice(PAGE)
    made.times |= {LoadTier(tier): times(per_s) for tier, per_s in rates.items()}
    return made


HOST, DISK, POOL = (Run(tier, 4) for tier in LoadTier)


def test_what_is_faster_than_computing_is_loaded() -> None:
    made = choice(host=10_000)
    decision = made.decide([HOST], rate(COMPUTE))
    (source,) = decision.sources
    assert (source.chosen, source.load_ms, source.compute_ms) == (True, 4, 40)
    assert chosen_pages(decision) == 4
    # All that was seen of a larger load may have been a fixed part.
    assert made.longest_s(decision) == 0.1


def test_what_is_slower_is_computed_and_all_after_it() -> None:
    made = choice(host=10_000, disk=100, pool=2000)
    decision = made.decide([HOST, DISK, POOL], rate(COMPUTE))
    assert [source.chosen for source in decision.sources] == [True, False, False]
    assert made.skipped == 1


def test_a_slow_run_is_loaded_for_the_sake_of_what_comes_after_it() -> None:
    made = choice(disk=900, pool=100_000)
    decision = made.decide([DISK, Run(LoadTier.POOL, 40)], rate(COMPUTE))
    assert [source.chosen for source in decision.sources] == [True, True]


def test_a_tier_that_was_not_measured_is_tried() -> None:
    made = choice()
    decision = made.decide([DISK, POOL], rate(COMPUTE))
    assert chosen_pages(decision) == 8
    assert made.longest_s(decision) is None


def test_a_slow_tier_is_tried_now_and_then() -> None:
    made = choice(pool=1)
    tried = [chosen_pages(made.decide([POOL], rate(COMPUTE))) for _ in range(32)]
    assert tried == ([0] * 15 + [4]) * 2


def test_where_a_part_is_of_no_use_it_is_all_or_none() -> None:
    made = choice(host=10_000, disk=100)
    assert chosen_pages(made.decide([HOST, DISK], rate(COMPUTE), whole=True)) == 0
    assert chosen_pages(made.decide([HOST, Run(LoadTier.HOST, 4)], rate(COMPUTE), whole=True)) == 8


def test_and_a_slow_pair_is_tried_now_and_then() -> None:
    made = choice(host=10_000, disk=100)
    tried = [chosen_pages(made.decide([HOST, DISK], rate(COMPUTE), whole=True)) for _ in range(32)]
    assert tried == ([0] * 15 + [8]) * 2


def test_a_load_costs_what_is_before_it_in_the_queue_as_well() -> None:
    made = choice(host=10_000)
    (short,) = made.decide([HOST], rate(COMPUTE), ahead={LoadTier.HOST: 32}).sources
    (long,) = made.decide([HOST], rate(COMPUTE), ahead={LoadTier.HOST: 40}).sources
    assert (short.load_ms, short.chosen, long.chosen) == (36, True, False)


def test_a_wait_is_told_and_not_learned() -> None:
    made, came = choice(), Loaded(LoadTier.HOST, 4, 0.02, waited_s=1.0)
    for _ in range(2):
        made.saw(came)
    assert made.times[LoadTier.HOST].tokens_per_s == pytest.approx(2000)
    (source,) = with_outcome(made.decide([HOST], rate(COMPUTE)), [came], overran=False).sources
    assert source.took_ms == pytest.approx(1020)


def test_times_are_learned_by_tier() -> None:
    made = choice()
    for _ in range(2):
        made.saw(Loaded(LoadTier.DISK, 4, 0.02))
    assert made.times[LoadTier.DISK].tokens_per_s == pytest.approx(2000)
    assert not made.times[LoadTier.HOST].is_known


def test_one_slow_load_of_few_pages_does_not_stop_one_of_many() -> None:
    made = choice()
    made.saw(Loaded(LoadTier.POOL, 2, 1.1))
    assert chosen_pages(made.decide([Run(LoadTier.POOL, 104)], rate(COMPUTE))) == 104
    made.saw(Loaded(LoadTier.POOL, 2, 1.1))
    # Nor do two such: they may have a fixed part of a second, and computing takes longer than that.
    assert chosen_pages(made.decide([Run(LoadTier.POOL, 120)], rate(COMPUTE))) == 120
    assert chosen_pages(made.decide([Run(LoadTier.POOL, 2)], rate(COMPUTE))) == 0


def test_a_try_that_was_fast_is_followed_by_another_at_once() -> None:
    made = choice(pool=100)
    decided = [chosen_pages(made.decide([POOL], rate(COMPUTE))) for _ in range(16)]
    assert decided == [0] * 15 + [4]
    made.saw(Loaded(LoadTier.POOL, 4, 0.001))
    assert chosen_pages(made.decide([POOL], rate(COMPUTE))) == 4


def test_the_outcome_stands_beside_the_estimate() -> None:
    decision = choice().decide([HOST, POOL], rate(COMPUTE))
    came = with_outcome(decision, [Loaded(LoadTier.HOST, 3, 0.5)], overran=True)
    assert [(one.loaded_pages, one.took_ms) for one in came.sources] == [(3, 500), (0, 0)]
    assert came.overran


rates_ = st.floats(1, 1e6)
runs_ = st.lists(st.builds(Run, st.sampled_from(list(LoadTier)), st.integers(1, 50)), max_size=6)


@given(runs_, rates_, rates_, rates_, rates_)
def test_no_other_split_is_cheaper(
    runs: list[Run], compute: float, host: float, disk: float, pool: float
) -> None:
    made = choice(host=host, disk=disk, pool=pool)
    sources = made.decide(runs, rate(compute)).sources
    chosen = [source.chosen for source in sources]
    assert chosen == sorted(chosen, reverse=True), "what is loaded is a leading part"

    def cost(split: int) -> float:
        loads = sum(source.load_ms for source in sources[:split])
        return loads + sum(source.compute_ms for source in sources[split:])

    best = min(map(cost, range(len(runs) + 1)))
    assert cost(sum(chosen)) <= best * (1 + 1e-9)

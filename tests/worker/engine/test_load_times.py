from __future__ import annotations

import statistics

import pytest
from hypothesis import given, strategies as st

from pie.worker.load_times import LoadTimes

Load = tuple[int, float]


def after(loads: list[Load]) -> LoadTimes:
    times = LoadTimes()
    for tokens, seconds in loads:
        times.saw(tokens, seconds)
    return times


def on_line(sizes: list[int], fixed_s: float, token_s: float) -> list[Load]:
    return [(size, fixed_s + token_s * size) for size in sizes]


sizes_ = st.integers(1, 4_000)
parts_ = st.floats(0, 2), st.floats(1e-6, 0.01)
loads_ = st.tuples(sizes_, st.floats(1e-4, 60))


@given(st.tuples(*parts_), st.integers(1, 500), st.permutations([1, 2, 4, 8]), sizes_)
def test_a_line_is_found(
    line: tuple[float, float], unit: int, order: list[int], asked: int
) -> None:
    fixed_s, token_s = line
    times = after(on_line([unit * size for size in order], fixed_s, token_s))
    assert times.seconds(asked) == pytest.approx(fixed_s + token_s * asked, rel=1e-6, abs=1e-9)


@given(
    st.tuples(*parts_),
    st.lists(sizes_, min_size=1, max_size=5),
    sizes_,
    st.floats(0, 60),
    st.integers(0, 5),
    sizes_,
)
def test_one_slow_load_makes_no_load_look_slower_than_the_others_say(
    line: tuple[float, float], sizes: list[int], odd: int, late_s: float, at: int, asked: int
) -> None:
    """Where the others lie on a line, an estimate is at most that, or the slowest of them."""
    fixed_s, token_s = line
    loads = on_line(sizes, fixed_s, token_s)
    slowest_s = max(seconds for _, seconds in loads)
    loads.insert(at, (odd, fixed_s + token_s * odd + late_s))
    most_s = max(fixed_s + token_s * asked, slowest_s)
    assert after(loads).seconds(asked) <= most_s * (1 + 1e-6)


@given(st.lists(loads_, min_size=2, max_size=12), sizes_, sizes_)
def test_estimates_are_bounded_and_grow_with_size(loads: list[Load], one: int, other: int) -> None:
    times, kept = after(loads), loads[-6:]
    least, most = sorted((one, other))
    assert 0 < times.seconds(least) <= times.seconds(most) * (1 + 1e-9)
    assert times.seconds(most) <= times.longest_s(most) * (1 + 1e-9)
    assert times.tokens_per_s == pytest.approx(1 / statistics.median_low(s / n for n, s in kept))


@given(st.lists(loads_, min_size=6, max_size=6), st.lists(loads_, max_size=6), sizes_)
def test_only_the_last_loads_count(last: list[Load], before: list[Load], asked: int) -> None:
    assert after(before + last).seconds(asked) == after(last).seconds(asked)


def test_one_load_says_nothing_yet() -> None:
    times = after([(32, 1.1)])
    assert (times.is_known, times.seconds(1_664), times.tokens_per_s) == (False, 0.0, 0.0)


def test_loads_of_one_size_leave_open_what_is_fixed() -> None:
    times = after([(100, 1.0)] * 6)
    assert [times.seconds(tokens) for tokens in (0, 50, 100, 1_000)] == [0, 0.5, 1.0, 1.0]
    assert [times.longest_s(tokens) for tokens in (50, 100, 1_000)] == [1.0, 1.0, 10.0]


def test_nothing_is_learned_from_nothing() -> None:
    times = after([(0, 1.0), (5, 0.0)] * 3)
    assert not times.is_known


def test_a_tier_that_has_changed_is_seen_to_after_some_loads() -> None:
    slow, fast = on_line([16, 64, 256] * 2, 1.0, 0.01), on_line([16, 64, 256, 1_024], 0.0, 1e-4)
    assert after(slow + fast[:3]).seconds(1_000) < 0.2 * after(slow).seconds(1_000)

"""A rate is kept to, and what was not used is not saved up for long."""

from hypothesis import given, strategies as st

from pie.pool.pace import Pace


@given(st.lists(st.integers(1, 1 << 20), min_size=1, max_size=50))
def test_bytes_never_go_faster_than_the_rate_and_a_quarter_of_a_second(sizes: list[int]) -> None:
    pace, now_s, used_at = Pace(1e6, 0.0), 0.0, list[tuple[float, int]]()
    for size in sizes:
        now_s += pace.delay_s(size, now_s)
        used_at.append((now_s, size))
    before = sum(sizes[:-1])
    assert now_s >= before / 1e6 - 0.26
    assert now_s <= before / 1e6 + 1e-6


def test_a_pause_is_made_up_for_by_a_quarter_of_a_second_at_most() -> None:
    pace = Pace(1e6, 0.0)
    pace.delay_s(1_000_000, 0.0)
    assert pace.delay_s(250_000, 100.0) == 0.0
    assert pace.delay_s(1, 100.0) == 0.0
    assert pace.delay_s(1_000_000, 100.0) > 0.0
    assert abs(pace.delay_s(1, 100.0) - 1.0) < 0.01


def test_no_rate_is_no_limit() -> None:
    pace = Pace(0, 0.0)
    assert pace.delay_s(1 << 40, 0.0) == 0.0
    assert pace.delay_s(1 << 40, 0.0) == 0.0

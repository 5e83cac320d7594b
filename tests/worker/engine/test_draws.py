from __future__ import annotations

from hypothesis import given, strategies as st

from pie.worker.draws import fresh_seed, uniform


def test_draws_are_what_they_have_always_been() -> None:
    drawn = [uniform(seed, position) for seed, position in ((0, 0), (0, 1), (42, 7), (-1, 0))]
    assert drawn == [
        0.3199015828399636,
        0.060188067527708555,
        0.17321062400126308,
        0.875961292674971,
    ]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**40))
def test_a_draw_is_a_function_of_seed_and_position(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1
    assert uniform(seed, position) == uniform(seed, position)


def test_draws_are_spread_evenly() -> None:
    draws = [uniform(7, position) for position in range(10_000)]
    counts = [sum(1 for draw in draws if int(draw * 10) == tenth) for tenth in range(10)]
    assert all(900 < count < 1100 for count in counts)


def test_requests_without_a_seed_get_different_ones() -> None:
    assert fresh_seed() != fresh_seed()

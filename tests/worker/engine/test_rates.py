from __future__ import annotations

import pytest

from pie.worker.rates import Rate, StepTimes


def test_a_rate_starts_at_what_is_assumed() -> None:
    rate = Rate(500.0)
    assert (rate.is_known, rate.per_s) == (False, 500.0)


def test_one_large_observation_counts_as_its_parts() -> None:
    whole, parts = Rate(1.0), Rate(1.0)
    whole.saw(100, 10.0)
    for seconds in (9.0, 1.0):
        parts.saw(50, seconds)
    assert whole.per_s == pytest.approx(parts.per_s, rel=0.02)


def test_newer_observations_count_more() -> None:
    rate = Rate(1.0, half_life_tokens=100)
    rate.saw(1000, 1.0)
    rate.saw(1000, 10.0)
    assert rate.per_s == pytest.approx(100, rel=0.05)


def test_nothing_is_learned_from_nothing() -> None:
    rate = Rate(7.0)
    rate.saw(0, 1.0)
    rate.saw(5, 0.0)
    assert not rate.is_known


def test_prefill_is_what_a_step_takes_beyond_decode() -> None:
    times = StepTimes()
    for _ in range(50):
        times.saw(prefill_tokens=0, decode_tokens=4, seconds=0.05)
    times.saw(prefill_tokens=100, decode_tokens=4, seconds=0.25)
    assert times.prefill.per_s == pytest.approx(500, rel=0.01)
    assert times.prefill_tokens(0.25, least=16) == pytest.approx(100, abs=2)


def test_a_slow_decode_leaves_prefill_its_least_share() -> None:
    times = StepTimes()
    times.saw(prefill_tokens=0, decode_tokens=4, seconds=3.0)
    assert times.prefill_tokens(0.25, least=16) == 16

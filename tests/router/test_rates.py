"""What is believed of workers, from much and from little."""

import pytest

from pie.router.rates import FleetRates, Rates
from pie.wire.messages import CachedTokens, Started


def shown(tokens: int, prefill_ms: float, *, pool: int = 0, load_ms: float = 0.0) -> Rates:
    rates = Rates()
    cached = CachedTokens(pool=pool)
    rates.learn(tokens + pool, Started(cached, 0.0, load_ms, prefill_ms))
    return rates


def test_a_worker_that_has_shown_nothing_is_believed_as_fast_as_its_peers() -> None:
    old, new = shown(10_000, 20_000), Rates()
    fleet = FleetRates([old, new])
    assert fleet.prefill_tokens_per_s(new) == pytest.approx(500, rel=0.02)
    assert fleet.prefill_tokens_per_s(old) == pytest.approx(500, rel=0.02)


def test_one_bad_moment_does_not_make_a_worker_slow() -> None:
    good, bad = shown(8_000, 8_000), shown(100, 500)
    fleet = FleetRates([good, bad])
    assert fleet.prefill_tokens_per_s(bad) > 0.75 * fleet.prefill_tokens_per_s(good)


def test_a_worker_that_is_slow_for_long_is_believed() -> None:
    fast, slow = Rates(), Rates()
    for _ in range(30):
        fast.learn(2000, Started(CachedTokens(), 0.0, 0.0, 1000))
        slow.learn(2000, Started(CachedTokens(), 0.0, 0.0, 4000))
    fleet = FleetRates([fast, slow])
    assert fleet.prefill_tokens_per_s(slow) == pytest.approx(500, rel=0.1)
    assert fleet.prefill_tokens_per_s(fast) == pytest.approx(2000, rel=0.2)


def test_tiny_prefills_teach_nothing() -> None:
    assert shown(5, 100) == Rates()
    assert shown(100, 0.1) == Rates()


def test_loads_are_learned_by_tier() -> None:
    fleet = FleetRates([shown(0, 0, pool=10_000, load_ms=5_000)])
    assert fleet.load_tokens_per_s(Rates(), "pool") == pytest.approx(2_000, rel=0.3)
    assert fleet.load_tokens_per_s(Rates(), "host") == 20_000


def test_two_tiers_at_once_teach_nothing() -> None:
    rates = Rates()
    rates.learn(400, Started(CachedTokens(host=200, pool=200), 0.0, 50.0, 0.0))
    assert rates.load == {}

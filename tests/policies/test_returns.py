"""What is learned of pages that come back, on cases that can be computed by hand."""

import numpy as np
import pytest

from pie.policies.ghosts import GhostTable
from pie.policies.returns import BINS, HORIZON, Returns
from tests.policies.pages import key


def watch(returns: Returns, kind: int, hazards: list[float], *, pages: int = 1_000) -> None:
    """Let pages of all ages be there for a while, and some of each age be used."""
    ages = np.array([2**at for at in range(14)])
    for age, hazard in zip(ages, hazards, strict=True):
        kinds = np.full(pages, kind, dtype=np.intp)
        returns.seen(kinds, np.full(pages, age), ticks=10_000, weight=1.0)
        for _ in range(round(pages * 10_000 * hazard)):
            returns.used(kind, int(age))


def test_where_age_does_not_matter_worth_is_the_hazard() -> None:
    returns = Returns(classes=1)
    returns.set_length(1024)
    watch(returns, 0, [1e-5] * 14)
    assert returns.worth()[0, 2:10] == pytest.approx(np.full(8, 1e-5), rel=0.2)


def test_a_page_is_worth_holding_through_an_age_at_which_none_returns() -> None:
    returns = Returns(classes=2)
    returns.set_length(1024)
    watch(returns, 0, [0.0] * 9 + [2e-5] + [0.0] * 4)
    watch(returns, 1, [0.0] * 14)
    worth = returns.worth()
    young, late = returns.bin_of(64), returns.bin_of(4 * 1024)
    assert worth[0, young] > 3 * worth[1, young]
    assert worth[0, late] < worth[0, young]


def test_what_is_known_stays_with_its_ages_when_the_tier_grows() -> None:
    returns = Returns(classes=1)
    returns.set_length(1024)
    watch(returns, 0, [0.0] * 9 + [2e-5] + [0.0] * 4)
    best = int(np.argmax(returns.worth()[0]))
    returns.set_length(4096)
    assert int(np.argmax(returns.worth()[0])) == best - 4


def test_ages_beyond_the_horizon_are_left_out() -> None:
    returns = Returns(classes=1)
    returns.used(0, returns.length * HORIZON)
    assert returns.worth().max() == 0
    assert returns.bin_of(10**12) == BINS - 1


def test_ages_fall_into_the_same_bins_one_by_one_and_together() -> None:
    returns = Returns(classes=1)
    returns.set_length(5_000)
    ages = np.array([0, 1, 100, 255, 256, 257, 1_000, 4_096, 70_000, 10**9])
    assert list(returns.bins_of(ages)) == [returns.bin_of(int(age)) for age in ages]


def test_a_ghost_is_taken_once() -> None:
    ghosts = GhostTable(100)
    ghosts.add(key(1), 0, tick=7, note=3)
    assert ghosts.held == 1
    assert ghosts.take(key(1), 1) is None
    assert ghosts.take(key(1), 0) == (7, 3)
    assert ghosts.take(key(1), 0) is None
    assert ghosts.held == 0


def test_old_ghosts_make_room_for_new_ones() -> None:
    ghosts = GhostTable(64)
    for at in range(1_000):
        ghosts.add(key(at), 0, tick=at)
    assert len(ghosts) == 64
    assert ghosts.held <= 64
    assert ghosts.take(key(999), 0) == (999, 0)

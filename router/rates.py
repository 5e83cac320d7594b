"""How fast workers are, learned from their answers.

Covers sums that forget, and what is believed of a worker that has shown little. Does not cover what
the rates decide (`pie.policies.routing_cost`). Pure.

A choice weighs the prefill of missing tokens several times, so that noise in the rates of two equal
workers would outweigh a held prefix: a worker counts as fast as all of them together until it has
shown otherwise for some seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pie.wire.messages import CachedTokens, Started

_HALF_LIFE_MS = 15_000.0
"""An observation counts half after so much more time of work: a few prompts of a slow worker, hundreds of
a fast one, whose rate would be noise if it followed two of them."""
_LEAST_TOKENS = 32
_LEAST_MS = 1.0
"""Less than this says more about fixed costs than about a rate."""
_OWN_MS = 2_000.0
"""A worker's own showing counts as much as everybody's once it is this long."""
_NOISE = 0.25
"""Equal workers differ by so much of a rate, by what they were asked. Counted as faster, one of them would get
all that nobody holds: on the conversation trace with 8 clients the busiest of four did 1.4 times the mean."""
_GUESS_MS = 100.0
"""And everybody's as much as the guess."""

PREFILL_TOKENS_PER_S = 1_000.0
"""The guess for prefill: SmolLM2-135M on one core."""
LOAD_TOKENS_PER_S = 20_000.0
"""The guess for loading: a page of SmolLM2-135M is 360 KiB, and the wire brings 1 GB/s."""


@dataclass(slots=True)
class Rate:
    """Tokens and the milliseconds that they took; newer ones count more."""

    tokens: float = 0.0
    ms: float = 0.0

    def saw(self, tokens: int, ms: float) -> None:
        """Take in one observation; a tiny one teaches nothing."""
        if tokens < _LEAST_TOKENS or ms < _LEAST_MS:
            return
        kept = 0.5 ** (ms / _HALF_LIFE_MS)
        self.tokens = self.tokens * kept + tokens
        self.ms = self.ms * kept + ms

    def believed(self, per_s: float, weight_ms: float) -> float:
        """Return tokens per second, where `per_s` has been believed for `weight_ms`."""
        return (self.tokens * 1e3 + per_s * weight_ms) / (self.ms + weight_ms)


@dataclass(slots=True)
class Rates:
    """What one worker has shown."""

    prefill: Rate = field(default_factory=Rate)
    load: dict[str, Rate] = field(default_factory=dict)
    """By the tier that pages came from."""

    def learn(self, prompt_tokens: int, started: Started) -> None:
        """Take in how a request began."""
        self.prefill.saw(prompt_tokens - started.cached.total, started.prefill_ms)
        loaded = loaded_tokens(started.cached)
        # Of two tiers nobody knows which one took how long.
        if len(loaded) == 1:
            [(tier, tokens)] = loaded.items()
            self.load.setdefault(tier, Rate()).saw(tokens, started.load_ms)


class FleetRates:
    """What is believed of each of several workers that run the same model."""

    def __init__(self, fleet: Iterable[Rates]) -> None:
        self._fleet = tuple(fleet)
        self._prefill = self._all_prefill().believed(PREFILL_TOKENS_PER_S, _GUESS_MS)
        self._load: dict[str, float] = {}

    def prefill_tokens_per_s(self, worker: Rates) -> float:
        """Return how fast a worker computes prompt tokens."""
        return _told_apart(worker.prefill.believed(self._prefill, _OWN_MS), self._prefill)

    def load_tokens_per_s(self, worker: Rates, tier: str) -> float:
        """Return how fast a worker loads from a tier."""
        fleet = self._load_of_all(tier)
        return _told_apart(worker.load.get(tier, _NOTHING).believed(fleet, _OWN_MS), fleet)

    def _load_of_all(self, tier: str) -> float:
        if tier not in self._load:
            self._load[tier] = self._all_loads(tier).believed(LOAD_TOKENS_PER_S, _GUESS_MS)
        return self._load[tier]

    def _all_prefill(self) -> Rate:
        return _sum(one.prefill for one in self._fleet)

    def _all_loads(self, tier: str) -> Rate:
        return _sum(one.load[tier] for one in self._fleet if tier in one.load)


def _told_apart(own: float, fleet: float) -> float:
    """Return a worker's rate where it differs from everybody's by more than noise, else everybody's."""
    return own if abs(own - fleet) > _NOISE * fleet else fleet


_NOTHING = Rate()


class RateColumns:
    """What each of many workers has shown of one rate; one that has shown nothing has two zeros."""

    def __init__(self, workers: int) -> None:
        self._tokens = np.zeros(workers)
        self._ms = np.zeros(workers)

    def put(self, worker: int, rate: Rate) -> None:
        """Take in what a worker has shown by now."""
        self._tokens[worker] = rate.tokens
        self._ms[worker] = rate.ms

    def sum(self) -> Rate:
        """Return all together."""
        # One after another, as workers that are few are summed up: in pairs the last digit may be another.
        return Rate(float(np.cumsum(self._tokens)[-1]), float(np.cumsum(self._ms)[-1]))

    def told_apart(self, fleet: float) -> npt.NDArray[np.bool_]:
        """Return which workers are not believed to do what everybody does."""
        own = (self._tokens * 1e3 + fleet * _OWN_MS) / (self._ms + _OWN_MS)
        apart: npt.NDArray[np.bool_] = np.abs(own - fleet) > _NOISE * fleet
        return apart


class ColumnRates(FleetRates):
    """The same of many workers, whose rates are kept in columns."""

    def __init__(self, prefill: RateColumns, load: Mapping[str, RateColumns]) -> None:
        self._prefill_columns, self._load_columns = prefill, load
        super().__init__(())

    @property
    def fleet_prefill_tokens_per_s(self) -> float:
        """What is believed of all that `apart` does not name."""
        return self._prefill

    def apart(self, tiers: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return which workers compute, or load from these tiers, at a rate of their own."""
        apart = self._prefill_columns.told_apart(self._prefill)
        for tier in tiers:
            if tier in self._load_columns:
                apart = apart | self._load_columns[tier].told_apart(self._load_of_all(tier))
        return apart

    def _all_prefill(self) -> Rate:
        return self._prefill_columns.sum()

    def _all_loads(self, tier: str) -> Rate:
        columns = self._load_columns.get(tier)
        return Rate() if columns is None else columns.sum()


def _sum(rates: Iterable[Rate]) -> Rate:
    """Return the tokens of all together, and their time."""
    total = Rate()
    for rate in rates:
        total.tokens += rate.tokens
        total.ms += rate.ms
    return total


def loaded_tokens(cached: CachedTokens) -> dict[str, int]:
    """Return the tokens that came from each tier below the device's."""
    tiers = {"host": cached.host, "disk": cached.disk, "pool": cached.pool}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}

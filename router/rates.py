"""How fast workers are, learned from their answers.

Covers sums that forget, and what is believed of a worker that has shown little. Does not cover what
the rates decide (`pie.policies.routing_cost`). Pure.

A choice weighs the prefill of missing tokens several times, so that noise in the rates of two equal
workers would outweigh a held prefix: a worker counts as fast as all of them together until it has
shown otherwise for some seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
        self._prefill = _mean((one.prefill for one in self._fleet), PREFILL_TOKENS_PER_S)
        self._load: dict[str, float] = {}

    def prefill_tokens_per_s(self, worker: Rates) -> float:
        """Return how fast a worker computes prompt tokens."""
        return _told_apart(worker.prefill.believed(self._prefill, _OWN_MS), self._prefill)

    def load_tokens_per_s(self, worker: Rates, tier: str) -> float:
        """Return how fast a worker loads from a tier."""
        if tier not in self._load:
            shown = (one.load[tier] for one in self._fleet if tier in one.load)
            self._load[tier] = _mean(shown, LOAD_TOKENS_PER_S)
        own = worker.load.get(tier, _NOTHING).believed(self._load[tier], _OWN_MS)
        return _told_apart(own, self._load[tier])


def _told_apart(own: float, fleet: float) -> float:
    """Return a worker's rate where it differs from everybody's by more than noise, else everybody's."""
    return own if abs(own - fleet) > _NOISE * fleet else fleet


_NOTHING = Rate()


def _mean(rates: Iterable[Rate], guess: float) -> float:
    """Return the tokens per second of all together."""
    total = Rate()
    for rate in rates:
        total.tokens += rate.tokens
        total.ms += rate.ms
    return total.believed(guess, _GUESS_MS)


def loaded_tokens(cached: CachedTokens) -> dict[str, int]:
    """Return the tokens that came from each tier below the device's."""
    tiers = {"host": cached.host, "disk": cached.disk, "pool": cached.pool}
    return {tier: tokens for tier, tokens in tiers.items() if tokens}

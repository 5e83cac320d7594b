"""Load or compute: which of a prompt's pages are fetched from below device memory.

Covers the cheapest split between the two. Pure. Does not cover how long a load takes
(`pie.worker.load_times`), where pages are (`pie.worker.lower_tiers`) or moving them
(`pie.worker.offload`).

Pages come in runs, in the order of the prompt, each in one tier. What is loaded must be a leading
part of them, because a page is of no use without those before it; all after it is computed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from pie.wire.messages import LoadDecision, LoadSource
from pie.worker.load_times import LoadTimes
from pie.worker.rates import Rate

_PROBE_EVERY = 16
"""A load that looks slower than computing is tried all the same once in so many times: else it
would never be seen that a tier has become faster."""
_FASTER = 0.5
"""One that took less than this part of its estimate is followed by another try at once."""


class LoadTier(enum.StrEnum):
    """Where pages can be loaded from, the nearest first."""

    HOST = "host"
    DISK = "disk"
    POOL = "pool"


class Run(NamedTuple):
    """Consecutive pages in one tier."""

    tier: LoadTier
    pages: int


class Loaded(NamedTuple):
    """What a load brought from one tier."""

    tier: LoadTier
    pages: int
    seconds: float
    """How long it took once its turn had come."""
    waited_s: float = 0.0
    """How long other loads were before it."""


class LoadChoice:
    """Weighs loads against computing, by the times that were seen.

    A tier of which too little was seen counts as fast, so that it is tried.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._passed_over: Counter[LoadTier] = Counter()
        self.times = {tier: LoadTimes() for tier in LoadTier}
        self.skipped = 0
        """How often computing was cheaper than some load that was possible."""

    def decide(
        self,
        runs: Sequence[Run],
        compute: Rate,
        *,
        ahead: Mapping[LoadTier, int] = MappingProxyType({}),
        whole: bool = False,
    ) -> LoadDecision:
        """Return which leading runs to load, so that all of them together take the least time.

        Args:
            runs: What could be loaded.
            compute: How fast the same tokens are computed.
            ahead: Pages that others wait for, by tier, and that come first.
            whole: Whether a part of the runs is of no use, so that it is all or none.
        """
        loads_ms = [self._load_ms(run.tier, run.pages) for run in runs]
        firsts = {run.tier: at for at, run in reversed(list(enumerate(runs)))}
        for tier, at in firsts.items():
            loads_ms[at] += self._load_ms(tier, ahead.get(tier, 0))
        computes_ms = [compute.seconds(run.pages * self._page_tokens) * 1e3 for run in runs]
        spent_ms = least_ms = sum(computes_ms)
        chosen = 0
        for count, (load_ms, compute_ms) in enumerate(
            zip(loads_ms, computes_ms, strict=True), start=1
        ):
            spent_ms += load_ms - compute_ms
            if spent_ms < least_ms and (count == len(runs) or not whole):
                chosen, least_ms = count, spent_ms
        if chosen < len(runs):
            tier = runs[chosen].tier
            self._passed_over[tier] += 1
            if self._passed_over[tier] % _PROBE_EVERY == 0:
                chosen = len(runs) if whole else chosen + 1
            else:
                self.skipped += 1
        return LoadDecision(
            tuple(
                LoadSource(run.tier.value, run.pages, load_ms, compute_ms, at < chosen)
                for at, (run, load_ms, compute_ms) in enumerate(
                    zip(runs, loads_ms, computes_ms, strict=True)
                )
            )
        )

    def saw(self, came: Loaded) -> None:
        """Learn how long a load took, its wait for others aside."""
        times, tokens = self.times[came.tier], came.pages * self._page_tokens
        if 0 < came.seconds < _FASTER * times.seconds(tokens):
            self._passed_over[came.tier] = _PROBE_EVERY - 1
        times.saw(tokens, came.seconds)

    def longest_s(self, decision: LoadDecision) -> float | None:
        """Return how long the load of all that was chosen may take; None where nobody knows."""
        chosen = [source for source in decision.sources if source.chosen]
        if not all(source.load_ms > 0 for source in chosen):
            return None
        return sum(
            max(
                source.load_ms / 1e3,
                self.times[LoadTier(source.tier)].longest_s(source.pages * self._page_tokens),
            )
            for source in chosen
        )

    def _load_ms(self, tier: LoadTier, pages: int) -> float:
        return self.times[tier].seconds(pages * self._page_tokens) * 1e3


def with_outcome(
    decision: LoadDecision, loaded: Sequence[Loaded], *, overran: bool
) -> LoadDecision:
    """Return a decision with what became of it; `loaded` is in the order of its sources."""
    sources = [
        msgspec.structs.replace(
            source, loaded_pages=came.pages, took_ms=(came.waited_s + came.seconds) * 1e3
        )
        for source, came in zip(decision.sources, loaded, strict=False)
    ]
    return LoadDecision((*sources, *decision.sources[len(sources) :]), overran)


def chosen_pages(decision: LoadDecision) -> int:
    """Return how many pages a decision wants loaded."""
    return sum(source.pages for source in decision.sources if source.chosen)

"""Loads of a mock engine: what to fetch from below device memory, and when it has come.

Covers the real choice between loading and computing over mock tiers, one load at a time for each tier.
Does not cover what a tier holds (`pie.simulator.tier`, `.pool`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Many
from typing import Protocol

from pie.page.key import PageKey
from pie.simulator.clock import Clock
from pie.simulator.cost_model import CostModel
from pie.simulator.tier import MockTier
from pie.worker.load_choice import LoadChoice, Loaded, LoadTier, Run, chosen_pages
from pie.worker.rates import Rate
from pie.worker.sequence import Sequence

_LEAST_POOL_PAGES = 2
"""As in `pie.worker.offload`: fewer pages are computed."""


Reading = Many[tuple[MockTier, PageKey]]
"""Pages that are being read, and where."""


class Source(Protocol):
    """Where pages can be loaded from."""

    def run(self, keys: Many[PageKey]) -> int:
        """Return how many leading pages are there."""
        ...

    def begin(self, keys: Many[PageKey], from_s: float) -> tuple[Reading, float]:
        """Begin to read pages, which are there, at a time; they stay until `end`. Return when they have come."""
        ...

    def end(self, reading: Reading) -> None:
        """End what `begin` began."""
        ...

    def drop(self, keys: Many[PageKey]) -> None:
        """Let go of pages that the worker has now."""
        ...


class Local:
    """A tier of the worker's own as a source.

    Args:
        name: Which one.
        tier: What it holds.
        cost: How long it takes.
        page_tokens: Tokens in a page.
    """

    def __init__(self, name: LoadTier, tier: MockTier, cost: CostModel, page_tokens: int) -> None:
        self._name = name
        self._tier = tier
        self._cost = cost
        self._page_tokens = page_tokens

    def run(self, keys: Many[PageKey]) -> int:
        """Return how many leading pages are there."""
        return self._tier.run(keys)

    def begin(self, keys: Many[PageKey], from_s: float) -> tuple[Reading, float]:
        """Begin to read."""
        self._tier.pin(keys)
        seconds = self._cost.load_s(self._name, len(keys) * self._page_tokens)
        return [(self._tier, key) for key in keys], from_s + seconds

    def end(self, reading: Reading) -> None:
        """End reading."""
        end_reading(reading)

    def drop(self, keys: Many[PageKey]) -> None:
        """Let go."""
        self._tier.drop(keys)


def end_reading(reading: Reading) -> None:
    """Let pages go again that were being read."""
    for tier, key in reading:
        tier.unpin((key,))


class Loads:
    """The loads of one worker.

    Args:
        tiers: Where pages can be loaded from, the nearest first.
        page_tokens: Tokens in a page.
        clock: The time.
        exclusive: Tiers that let go of what was loaded.
    """

    def __init__(
        self,
        tiers: Mapping[LoadTier, Source],
        *,
        page_tokens: int,
        clock: Clock,
        exclusive: Many[LoadTier] = (),
    ) -> None:
        self._tiers = tiers
        self._page_tokens = page_tokens
        self._clock = clock
        self._exclusive = exclusive
        self._choice = LoadChoice(page_tokens)
        self._free_at_s = dict.fromkeys(tiers, 0.0)
        self.pages: Counter[LoadTier] = Counter()
        """Pages loaded, by tier."""

    def wish(self, sequence: Sequence, compute: Rate) -> int:
        """Return how many pages after its frozen ones a sequence should load; 0 to compute them."""
        runs = self._runs(sequence)
        sequence.load_decision = sequence.load_wish = None
        if not runs:
            return 0
        decision = self._choice.decide(runs, compute)
        chosen = chosen_pages(decision)
        if chosen:
            sequence.load_wish = decision
        else:
            sequence.load_decision = decision
        return chosen

    def begin(self, sequence: Sequence, ended: Callable[[Sequence, list[Loaded]], None]) -> None:
        """Fetch what `sequence` has reserved; `ended` is called with it when that is over."""
        decision = sequence.load_decision = sequence.load_wish
        assert decision is not None
        working_set, now_s = sequence.working_set, self._clock.now_s()
        at = working_set.frozen
        loaded: list[Loaded] = []
        begun: list[tuple[LoadTier, list[PageKey], Reading]] = []
        ready_s = now_s
        for source in decision.sources:
            if not source.chosen:
                break
            tier = LoadTier(source.tier)
            keys = working_set.keys[at : at + source.pages]
            # Some may have left to make room for what left device memory to make room for these.
            keys = keys[: self._tiers[tier].run(keys)]
            from_s = max(ready_s, self._free_at_s[tier])
            reading, ready_s = self._tiers[tier].begin(keys, from_s)
            self._free_at_s[tier] = ready_s
            begun.append((tier, keys, reading))
            at += len(keys)
            loaded.append(Loaded(tier, len(keys), ready_s - from_s))
            if len(keys) < source.pages:
                break

        def end() -> None:
            sequence.load_s = self._clock.now_s() - now_s
            for tier, keys, reading in begun:
                self._tiers[tier].end(reading)
                if tier in self._exclusive:
                    self._tiers[tier].drop(keys)
            for one in loaded:
                self._choice.saw(one)
                self.pages[one.tier] += one.pages
            ended(sequence, loaded)

        self._clock.at(ready_s, end)

    def _runs(self, sequence: Sequence) -> list[Run]:
        """Return where the pages after a sequence's frozen ones can be had."""
        keys, runs, at = sequence.working_set.loadable_keys, list[Run](), 0
        going = True
        while going and at < len(keys):
            going = False
            for name, tier in self._tiers.items():
                count = tier.run(keys[at:])
                if count >= (_LEAST_POOL_PAGES if name is LoadTier.POOL else 1):
                    runs.append(Run(name, count))
                    at, going = at + count, True
                    break
        return runs

"""Loads of a mock engine: what to fetch from below device memory, and when it has come.

Covers the real choice between loading and computing over mock tiers, one load at a time for each tier.
Does not cover what a tier holds (`pie.simulator.tier`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Many

from pie.page.key import PageKey
from pie.simulator.clock import Clock
from pie.simulator.cost_model import CostModel
from pie.simulator.tier import MockTier
from pie.worker.load_choice import LoadChoice, Loaded, LoadTier, Run, chosen_pages
from pie.worker.rates import Rate
from pie.worker.sequence import Sequence

_LEAST_POOL_PAGES = 2
"""As in `pie.worker.offload`: fewer pages are computed."""


class Loads:
    """The loads of one worker.

    Args:
        tiers: Where pages can be loaded from, the nearest first.
        cost: How long it takes.
        page_tokens: Tokens in a page.
        clock: The time.
        exclusive: Tiers that let go of what was loaded.
    """

    def __init__(
        self,
        tiers: Mapping[LoadTier, MockTier],
        cost: CostModel,
        *,
        page_tokens: int,
        clock: Clock,
        exclusive: Many[LoadTier] = (),
    ) -> None:
        self._tiers = tiers
        self._cost = cost
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
        pinned: list[tuple[LoadTier, list[PageKey]]] = []
        ready_s = now_s
        for source in decision.sources:
            if not source.chosen:
                break
            tier = LoadTier(source.tier)
            keys = working_set.keys[at : at + source.pages]
            # Some may have left to make room for what left device memory to make room for these.
            keys = keys[: self._tiers[tier].run(keys)]
            self._tiers[tier].pin(keys)
            pinned.append((tier, keys))
            at += len(keys)
            seconds = self._cost.load_s(tier, len(keys) * self._page_tokens)
            ready_s = self._free_at_s[tier] = max(ready_s, self._free_at_s[tier]) + seconds
            loaded.append(Loaded(tier, len(keys), seconds))
            if len(keys) < source.pages:
                break

        def end() -> None:
            sequence.load_s = self._clock.now_s() - now_s
            for tier, keys in pinned:
                self._tiers[tier].unpin(keys)
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

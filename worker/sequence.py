"""One sequence as the scheduler sees it.

Covers its state, its place in the queue and what it cost so far. Does not cover the request behind
it or the text that it makes (`pie.worker.generation`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pie.wire.messages import CachedTokens, LoadDecision, MissedPages, MissReason, Started
from pie.worker.load_choice import Loaded, LoadTier, chosen_pages
from pie.worker.working_set import WorkingSet


class SequenceState(enum.Enum):
    """Where a sequence stands."""

    WAITING = "waiting"
    LOADING = "loading"
    """Its pages come from a lower tier or the pool; other sequences go on."""
    RUNNING = "running"
    FORKING = "forking"
    """It becomes a fork of another, which is computing the prompt of both."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """A sequence to continue. Compared by identity."""

    number: int
    """Its arrival: a smaller one came earlier."""
    working_set: WorkingSet
    arrived_s: float
    priority: int = 0
    """A smaller one has its turn earlier."""
    state: SequenceState = SequenceState.WAITING
    load_tried: bool = False
    held_until_s: float = 0.0
    """It runs nothing before then, because forks of it are on their way."""
    admitted_s: float | None = None
    """When it first got a place among the running."""
    load_s: float = 0.0
    prefill_s: float = 0.0
    """Time of the steps that computed its prompt, its share of them."""
    reached: int = field(default=0)
    """Most tokens whose state it ever had; winning those again after pre-emption is no hit."""
    cached_device: int = 0
    """Tokens that it did not compute because their pages were in device memory."""
    cached_by_load: Counter[LoadTier] = field(default_factory=Counter)
    """Tokens that it did not compute because their pages were loaded, by where they came from."""
    load_wish: LoadDecision | None = None
    """A decision to load, until there was room to begin."""
    load_decision: LoadDecision | None = None
    """What was weighed when it was last decided whether to load; None where that could not begin."""
    missed_from: int = 0
    """Leading pages that were in device memory when its first turn came."""
    missed: tuple[MissedPages, ...] | None = None
    """What was known then of the full pages after them; None before that turn."""
    awaited: int = 0
    """Tokens that it waits for, because another sequence computes or loads their pages."""
    expected_tokens: int = 0
    """Tokens to compute before its first output, as estimated on arrival."""

    @property
    def is_wanted(self) -> bool:
        """Whether its request has not ended."""
        return self.state is not SequenceState.FINISHED

    @property
    def cached_pool(self) -> int:
        """Tokens that it did not compute because their pages came from the pool."""
        return self.cached_by_load[LoadTier.POOL]

    @property
    def told_missed(self) -> tuple[MissedPages, ...]:
        """`missed`, where a load for which there was no room counts as that."""
        missed = self.missed or ()
        if self.load_wish is None or self.load_decision is not None:
            return missed
        left = chosen_pages(self.load_wish)
        told = [MissedPages(MissReason.NO_ROOM, left)]
        for run in missed:
            gone = min(left, run.pages)
            left -= gone
            if run.pages > gone:
                told.append(MissedPages(run.reason, run.pages - gone))
        return tuple(told)

    @property
    def length(self) -> int:
        """Tokens of prompt and output so far."""
        return len(self.working_set.tokens)

    @property
    def missing(self) -> int:
        """Tokens to run before the next token can be drawn; 1 is a decode."""
        return self.working_set.missing

    def note_reached(self) -> int:
        """Move `reached` to where the working set is; return by how much."""
        gained = max(0, self.working_set.computed - self.reached)
        self.reached += gained
        return gained

    def started(self, now_s: float) -> Started:
        """Return how it began, at its first token."""
        waited_s = now_s - self.arrived_s - self.load_s - self.prefill_s
        return Started(
            cached=CachedTokens(
                device=self.cached_device,
                **{tier.value: tokens for tier, tokens in self.cached_by_load.items()},
            ),
            queued_ms=max(0.0, waited_s) * 1e3,
            load_ms=self.load_s * 1e3,
            prefill_ms=self.prefill_s * 1e3,
            load=self.load_decision,
            missed_from=self.missed_from,
            missed=self.told_missed,
        )

    def note_loaded(self, won: int, sources: Iterable[Loaded], page_tokens: int) -> None:
        """Count the `won` tokens of a load; `sources` are in their order, the pool has the rest."""
        # Those that it had before it was pre-empted are no hit.
        seen = won - self.note_reached()
        at = 0
        for source in sources:
            end = min(at + source.pages * page_tokens, won)
            self.cached_by_load[source.tier] += max(0, end - max(at, seen))
            at = end
        self.cached_by_load[LoadTier.POOL] += max(0, won - max(at, seen))

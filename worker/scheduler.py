"""Which sequences run in the next step, and how many tokens of each.

Covers continuous batching, chunked prefill, admission and pre-emption. Pure: events in, plans out;
time comes in as `now_s`. Does not cover running a plan (`pie.worker.engine`).

A step takes the next token of every sequence in decode first, then prefill by priority and by when each prompt
would be done had it been alone since it came, bounded so that a long prompt does not stall the others' tokens. So
a short prompt passes a long one, and none is passed by what comes after the time that it takes itself
(`docs/design/0019-prefill-order.md`). A sequence is admitted in order of arrival, when its whole prompt fits
beside what the running ones were promised. When pages run out all the same, the youngest of the least
important is suspended: its frozen pages stay cached, in this tier or a lower one, the rest of what it computed
is kept aside where there is room, and it goes on from there later.

A page is computed by one sequence at a time (single flight): whoever needs a page that an earlier
one is about to compute, or that a load is to bring, waits for it, page by page. Who that is is seen
anew in each step, so that a waiter takes over where the earlier one ended or was pre-empted. With a
recurrent model it waits for the next snapshot that it can go on from; where that is not made, because
there is no slot for it, it waits for a later one or computes.

A sequence with the very prompt of another may wait to become a fork of it: then it takes that one's
pages as they are when the prompt is computed, and runs from there.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from pie.worker.load_choice import Loaded
from pie.worker.page_table import PageTable
from pie.worker.sequence import Sequence, SequenceState
from pie.worker.state_table import StateTable
from pie.worker.working_set import ForkMemory, WorkingSet

_MOST_LOGITS = 256
"""Tokens of a chunk for each of which logits are kept: of 150,000 they take 150 MB."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the scheduler keeps to."""

    max_running: int
    """Sequences that are running or loading."""
    max_waiting: int
    step_tokens: int
    """Most tokens of one step, at least `max_running`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `tokens` tokens of a sequence."""

    sequence: Sequence
    tokens: int
    draws: bool
    """Whether it ends with the sequence's last token, so that the next one can be drawn."""


@dataclass(slots=True)
class StepPlan:
    """What to do in one step."""

    chunks: list[Chunk] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)
    """Sequences that are now in state `LOADING`, with pages reserved."""

    @property
    def tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)


LoadWish = Callable[[Sequence], int]
"""Says how many pages after its frozen ones a sequence should load rather than compute."""


def _no_load(_: Sequence) -> int:
    return 0


class Suspender(Protocol):
    """Keeps what a sequence that must yield has computed beyond its frozen pages."""

    def suspend(self, sequence: Sequence) -> None:
        """Keep it, where there is room; the sequence's pages are still there."""

    def resume(self, sequence: Sequence, now_s: float) -> None:
        """Give it back once the pages before it are there."""

    def drop(self, sequence: Sequence) -> None:
        """Forget it."""


class _NoSuspender:
    def suspend(self, sequence: Sequence) -> None:
        pass

    def resume(self, sequence: Sequence, now_s: float) -> None:
        pass

    def drop(self, sequence: Sequence) -> None:
        pass


class Scheduler:
    """Plans steps over one page table.

    Args:
        table: The pages.
        limits: What plans keep to.
        page_tokens: Tokens in a page.
        load_wish: Asked for each sequence before it computes anything, and anew after it yielded.
        states: The states of a recurrent model.
    """

    def __init__(
        self,
        table: PageTable,
        limits: Limits,
        *,
        page_tokens: int,
        load_wish: LoadWish = _no_load,
        states: StateTable | None = None,
    ) -> None:
        assert 0 < limits.max_running <= limits.step_tokens
        self._table = table
        self._limits = limits
        self._page_tokens = page_tokens
        self._load_wish = load_wish
        self.suspender: Suspender = _NoSuspender()
        self._states = states
        # Each by priority, and then in order of arrival.
        self._waiting: list[Sequence] = []
        self._loading: list[Sequence] = []
        self._running: list[Sequence] = []
        self._forking: list[Sequence] = []
        self._orphans: list[Sequence] = []
        self.preemptions = 0
        self.shared_in_flight = 0
        """Tokens that sequences did not compute because they waited for another that did."""

    @property
    def running(self) -> int:
        """Sequences that have a place in steps."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that have none yet, those that load included."""
        return len(self._waiting) + len(self._loading) + len(self._forking)

    @property
    def loading(self) -> int:
        """Sequences whose pages come from a lower tier or the pool."""
        return len(self._loading)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is left and no load under way."""
        return not (
            self._waiting or self._loading or self._running or self._forking or self._orphans
        )

    @property
    def waiting_tokens(self) -> int:
        """Tokens ahead of a new arrival: not computed yet, those in decode left out."""
        return sum(one.expected_tokens for one in self._waiting) + sum(
            one.missing - one.awaited
            for one in self._loading + self._running
            if one.missing - one.awaited > 1
        )

    def submit(self, sequence: Sequence) -> bool:
        """Queue a sequence; False where it would have to wait and the queue is full.

        What has arrived since the last plan and fits waits for nothing, and is no part of the queue.
        """
        full = len(self._waiting) >= self._limits.max_waiting
        sequence.expected_tokens = self._expected_tokens(sequence)
        self._queue(sequence)
        if full:
            self._admit(sequence.arrived_s)
            waits = sequence.state is SequenceState.WAITING
            if waits and len(self._waiting) > self._limits.max_waiting:
                self._waiting.remove(sequence)
                return False
        return True

    def submit_fork(self, sequence: Sequence) -> bool:
        """Let a sequence wait for `fork`; False, and no change, where there are too many."""
        ahead = self._occupied + len(self._waiting) + len(self._forking)
        if ahead >= self._limits.max_running + self._limits.max_waiting:
            return False
        sequence.expected_tokens = 0
        sequence.state = SequenceState.FORKING
        bisect.insort(self._forking, sequence, key=_turn)
        return True

    def fork(self, parent: Sequence, sequence: Sequence, memory: ForkMemory, now_s: float) -> bool:
        """Make a waiting sequence a fork of `parent`, whose tokens are all computed.

        Returns whether it runs now. Where there is no room it waits for its turn like others.
        """
        forked = None
        if self._occupied < self._limits.max_running and self._fits(sequence):
            forked = parent.working_set.fork(memory, now_s)
        if forked is None:
            self.fork_alone(sequence)
            return False
        self._forking.remove(sequence)
        sequence.working_set = forked
        sequence.admitted_s = now_s
        sequence.cached_device = sequence.note_reached()
        self._run(sequence)
        return True

    def fork_alone(self, sequence: Sequence) -> None:
        """Queue a sequence that waits for a parent which is gone."""
        self._forking.remove(sequence)
        sequence.expected_tokens = self._expected_tokens(sequence)
        self._queue(sequence)

    def plan(
        self, now_s: float, *, prefill_tokens: int, tokens_per_s: float = math.inf
    ) -> StepPlan:
        """Choose the next step.

        Args:
            now_s: The time.
            prefill_tokens: Most prefill tokens of a step in which others decode.
            tokens_per_s: How fast prompts are computed. Without end, they run in order of arrival.
        """
        plan = StepPlan()
        self._admit(now_s)
        chunks: dict[int, Chunk] = {}
        for sequence in list(self._running):
            if sequence.held_until_s > now_s:
                continue
            if sequence.state is SequenceState.RUNNING and sequence.missing == 1:
                self.suspender.resume(sequence, now_s)
                self._add(chunks, sequence, 1, now_s)
        left = prefill_tokens if chunks else self._limits.step_tokens
        under_way = {
            key
            for one in (*self._loading, *(chunk.sequence for chunk in chunks.values()))
            for key in one.working_set.next_keys
        }
        for sequence in self._in_prefill_order(tokens_per_s):
            if sequence.state is not SequenceState.RUNNING or sequence.number in chunks:
                continue
            self._match(sequence, now_s)
            sequence.awaited = sequence.working_set.leading_tokens(under_way)
            if sequence.awaited:
                continue
            if self._begin_load(sequence, now_s):
                plan.loads.append(sequence)
                under_way.update(sequence.working_set.next_keys)
                continue
            if sequence.held_until_s > now_s:
                under_way.update(sequence.working_set.next_keys)
                continue
            self.suspender.resume(sequence, now_s)
            room = self._limits.step_tokens - sum(chunk.tokens for chunk in chunks.values())
            # A sequence that another's prefill left with one token decodes: no prefill budget.
            budget = min(room, max(left, 0)) if sequence.missing > 1 else room
            tokens = self._chunk_tokens(sequence, budget)
            if tokens and self._add(chunks, sequence, tokens, now_s) and sequence.missing > 1:
                left -= tokens
            if sequence.state is SequenceState.RUNNING:
                under_way.update(sequence.working_set.next_keys)
        plan.chunks.extend(chunks.values())
        return plan

    def advance(self, chunk: Chunk, now_s: float, *, is_pure: bool = True) -> list[int]:
        """Learn that a chunk was computed; return the indices of pages that nobody held before."""
        new = chunk.sequence.working_set.advance(chunk.tokens, now_s, is_pure=is_pure)
        chunk.sequence.note_reached()
        return new

    def loaded(
        self,
        sequence: Sequence,
        pages: int,
        now_s: float,
        sources: Iterable[Loaded] = (),
        *,
        has_state: bool = False,
    ) -> None:
        """End a sequence's load of which the first `pages` pages came, from `sources` in order.

        Args:
            sequence: In state `LOADING`, or finished meanwhile.
            pages: How many leading pages came.
            now_s: The time.
            sources: What came from where.
            has_state: Whether the recurrent state after the last of them came too.
        """
        if sequence in self._orphans:
            self._orphans.remove(sequence)
            sequence.working_set.end_load(pages, now_s)
            sequence.working_set.release()
            return
        self._loading.remove(sequence)
        won = sequence.working_set.end_load(pages, now_s, has_state=has_state)
        sequence.note_loaded(won, sources, self._page_tokens)
        self._run(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds, at once or when its load has ended."""
        self.suspender.drop(sequence)
        if sequence.state is SequenceState.LOADING:
            self._loading.remove(sequence)
            self._orphans.append(sequence)
        elif sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
            sequence.working_set.release()
        elif sequence.state is SequenceState.WAITING:
            self._waiting.remove(sequence)
        elif sequence.state is SequenceState.FORKING:
            self._forking.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def next_waiting(self) -> Iterator[Sequence]:
        """List those that wait for their turn, the next one first."""
        return iter(self._waiting)

    def sequences(self) -> Iterator[Sequence]:
        """List all that hold or want pages."""
        yield from (
            *self._running,
            *self._loading,
            *self._waiting,
            *self._forking,
            *self._orphans,
        )

    def computing(self) -> Iterator[WorkingSet]:
        """List the working sets of those that run or load."""
        yield from (one.working_set for one in (*self._running, *self._loading))

    def check(self) -> None:
        """Raise `AssertionError` where scheduler and page table contradict themselves."""
        for sequences, state in (
            (self._waiting, SequenceState.WAITING),
            (self._loading, SequenceState.LOADING),
            (self._running, SequenceState.RUNNING),
            (self._forking, SequenceState.FORKING),
            (self._orphans, SequenceState.FINISHED),
        ):
            assert all(one.state is state for one in sequences)
            if sequences is not self._orphans:
                assert sequences == sorted(sequences, key=_turn)
        assert len(self._running) + len(self._loading) <= self._limits.max_running
        waiting = self._waiting + self._forking
        assert all(not one.working_set.pages for one in waiting)
        assert not any(one.working_set.state_slots for one in waiting)
        assert not any(one.awaited for one in self._waiting + self._loading)

    def _in_prefill_order(self, tokens_per_s: float) -> list[Sequence]:
        """Return those that run, by priority and by when each would be done alone."""
        return sorted(
            self._running,
            key=lambda one: (one.priority, one.arrived_s + one.missing / tokens_per_s, one.number),
        )

    def _admit(self, now_s: float) -> None:
        while self._waiting and self._occupied < self._limits.max_running:
            sequence = self._waiting[0]
            if not self._fits(sequence):
                break
            del self._waiting[0]
            if sequence.admitted_s is None:
                sequence.admitted_s = now_s
            self._match(sequence, now_s)
            under_way = self._pages_under_way(sequence) - sequence.working_set.frozen
            sequence.awaited = max(0, under_way) * self._page_tokens
            self._run(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """Say whether its prompt and one page more fit beside what was promised to others.

        A page that several wait for is promised once, to the one that computes it.
        """
        working_set = sequence.working_set
        if self._states is not None:
            slots = 1 + working_set.takes_idle_snapshot()
            slots += sum(one.working_set.wants_state_slot for one in self._running)
            if slots > self._states.available:
                return False
        held = working_set.held()
        shared = max(held.pages, self._pages_under_way(sequence))
        needed = working_set.pages_for(sequence.length + 1) - shared
        promised = sum(
            one.working_set.pages_for(one.length + 1) - one.awaited // self._page_tokens
            for one in self._running + self._loading
        )
        return needed + promised <= self._table.available - held.idle

    def _begin_load(self, sequence: Sequence, now_s: float) -> bool:
        """Let a sequence that has computed nothing yet load instead, once, where it wishes to."""
        if sequence.load_tried:
            return False
        sequence.load_tried = True
        count = self._load_wish(sequence)
        if count <= 0 or sequence.working_set.begin_load(count, now_s) is None:
            return False
        self._running.remove(sequence)
        sequence.state = SequenceState.LOADING
        bisect.insort(self._loading, sequence, key=_turn)
        return True

    def _expected_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens it would compute with what is held now."""
        held = sequence.working_set.held()
        return max(1, sequence.length - held.pages * self._page_tokens)

    def _pages_under_way(self, sequence: Sequence) -> int:
        """Return how many of its leading pages others hold, compute or load."""
        return max(
            (
                sequence.working_set.shared_pages(one.working_set)
                for one in self._running + self._loading
            ),
            default=0,
        )

    def _match(self, sequence: Sequence, now_s: float) -> None:
        won = sequence.working_set.match(now_s)
        if won:
            sequence.cached_device += sequence.note_reached()
            if sequence.awaited:
                self.shared_in_flight += won

    def _chunk_tokens(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens to run: up to `budget`, and to a page's end where it is cut.

        A chunk of a recurrent model ends where a snapshot is due.
        """
        wanted = min(sequence.missing, sequence.working_set.until_snapshot or sequence.missing)
        if sequence.working_set.own_from is not None:
            budget = min(budget, _MOST_LOGITS)
        if wanted <= budget:
            return wanted
        start = sequence.working_set.computed
        aligned = (start + budget) // self._page_tokens * self._page_tokens - start
        return aligned if aligned > 0 else budget

    def _add(self, chunks: dict[int, Chunk], sequence: Sequence, tokens: int, now_s: float) -> bool:
        """Plan a chunk, pre-empting the youngest until its pages are there."""
        while not sequence.working_set.grow(sequence.working_set.computed + tokens, now_s):
            youngest = self._running[-1]
            self._preempt(youngest)
            chunks.pop(youngest.number, None)
            if youngest is sequence:
                return False
        chunks[sequence.number] = Chunk(sequence, tokens, draws=tokens == sequence.missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self.suspender.suspend(sequence)
        sequence.working_set.release()
        sequence.load_tried = False
        sequence.expected_tokens = 1
        sequence.awaited = 0
        self._queue(sequence)
        self.preemptions += 1

    def _queue(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        bisect.insort(self._waiting, sequence, key=_turn)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        bisect.insort(self._running, sequence, key=_turn)

    @property
    def _occupied(self) -> int:
        return len(self._running) + len(self._loading)


def _turn(sequence: Sequence) -> tuple[int, int]:
    return (sequence.priority, sequence.number)

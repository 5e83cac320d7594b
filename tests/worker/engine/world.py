"""A scheduler with a memory that its plans write, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pie.page.events import Part
from pie.page.key import RootKey
from pie.policies.manager import RetentionManager
from pie.worker.page_table import PageTable
from pie.worker.scheduler import Limits, Scheduler, StepPlan
from pie.worker.sequence import Sequence
from pie.worker.state_table import StateTable
from pie.worker.working_set import WorkingSet

PAGE = 4
ROOT = RootKey(b"r" * 32)


@dataclass
class World:
    """A scheduler, a memory that its plans write, and what each sequence still has to make."""

    pages: int = 16
    max_running: int = 4
    max_waiting: int = 100
    step_tokens: int = 16
    prefill_tokens: int = 8
    tokens_per_s: float = math.inf
    load_wish: Callable[[Sequence], int] = lambda _: 0
    slots: int = 0
    """State slots; some make it a recurrent model, without attention where there are no pages."""
    stride_pages: int = 3
    now_s: float = 0.0
    left: dict[int, int] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    """Tokens that each sequence has made."""
    computed: int = 0
    last: StepPlan | None = None

    def __post_init__(self) -> None:
        self.table = PageTable(
            self.pages, page_bytes=1, part=Part.FULL, retention=RetentionManager()
        )
        limits = Limits(self.max_running, self.max_waiting, self.step_tokens)
        self.states: StateTable | None = None
        if self.slots:
            self.states = StateTable(
                self.slots,
                state_bytes=1,
                stride_pages=self.stride_pages,
                retention=RetentionManager(),
            )
        self.scheduler = Scheduler(
            self.table, limits, page_tokens=PAGE, load_wish=self._wish, states=self.states
        )
        self.memory: dict[tuple[int, int], int] = {}
        self.state_memory: dict[int, list[int]] = {}
        """For each state slot, the tokens that its state stands for."""
        self.sequences: list[Sequence] = []

    def _wish(self, sequence: Sequence) -> int:
        return self.load_wish(sequence)

    def submit(self, tokens: Iterable[int], outputs: int = 1, priority: int = 0) -> Sequence:
        working_set = WorkingSet(self.table, ROOT, tokens, page_tokens=PAGE, states=self.states)
        sequence = Sequence(len(self.sequences), working_set, self.now_s, priority)
        self.sequences.append(sequence)
        assert self.scheduler.submit(sequence)
        self.left[sequence.number] = outputs
        self.made[sequence.number] = 0
        return sequence

    def fork(self, parent: Sequence, outputs: int) -> Sequence:
        """Begin a sequence as a fork of one that runs, or as one of its own where there is no room."""
        sequence = Sequence(len(self.sequences), parent.working_set.twin(), self.now_s)
        self.sequences.append(sequence)
        assert self.scheduler.submit_fork(sequence)
        self.left[sequence.number] = outputs
        self.made[sequence.number] = 0
        self.scheduler.fork(parent, sequence, self, self.now_s)
        return sequence

    def copy(self, source_id: int, target_id: int) -> None:
        for slot in range(PAGE):
            if (source_id, slot) in self.memory:
                self.memory[target_id, slot] = self.memory[source_id, slot]

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        self.state_memory[target_slot] = self.state_memory[source_slot]

    def plan(self) -> StepPlan:
        self.now_s += 1
        self.last = self.scheduler.plan(
            self.now_s, prefill_tokens=self.prefill_tokens, tokens_per_s=self.tokens_per_s
        )
        return self.last

    def step(self) -> StepPlan:
        """Plan, check that what is read was written, write, and draw tokens."""
        plan = self.plan()
        for chunk in plan.chunks:
            self._run(chunk.sequence, chunk.tokens)
        for chunk in plan.chunks:
            new = self.scheduler.advance(chunk, self.now_s)
            self._froze(chunk.sequence, new)
            self.computed += chunk.tokens
            if chunk.draws:
                self._draw(chunk.sequence)
        self.check()
        return plan

    def run(self, *, limit: int = 2000) -> int:
        """Step until nothing is left; return the number of steps."""
        for steps in range(limit):
            if self.scheduler.is_empty:
                return steps
            self.step()
        raise AssertionError(f"not done after {limit} steps")

    def write(self, sequence: Sequence, slots: Iterable[int]) -> None:
        for slot in slots:
            page = sequence.working_set.pages[slot // PAGE]
            self.memory[page, slot % PAGE] = sequence.working_set.tokens[slot]

    def check(self) -> None:
        self.scheduler.check()
        self.table.check([one.working_set.pages for one in self.scheduler.sequences()])
        if self.states is not None:
            self.states.check([one.working_set.state_slots for one in self.scheduler.sequences()])

    def _run(self, sequence: Sequence, tokens: int) -> None:
        working_set = sequence.working_set
        start = working_set.computed
        if working_set.state is not None:
            self._run_state(working_set, start + tokens)
        if not self.table.total:
            return
        if working_set.writes:
            self.write(sequence, range(start, start + tokens))
        for slot in range(start + tokens):
            page = working_set.pages[slot // PAGE]
            assert self.memory[page, slot % PAGE] == working_set.tokens[slot], "a wrong page"

    def _run_state(self, working_set: WorkingSet, end: int) -> None:
        state = working_set.state
        assert state is not None
        assert state.target is not None
        known = [] if state.source is None else self.state_memory[state.source]
        assert known == list(working_set.tokens[: working_set.computed]), "a wrong state"
        self.state_memory[state.target] = list(working_set.tokens[:end])

    def _froze(self, sequence: Sequence, indices: Iterable[int]) -> None:
        """Learn which pages of a sequence nobody held before."""

    def _draw(self, sequence: Sequence) -> None:
        sequence.working_set.append(sequence.number % 7)
        self.made[sequence.number] += 1
        self.left[sequence.number] -= 1
        if not self.left[sequence.number]:
            self.scheduler.finish(sequence)


def chunks(plan: StepPlan) -> dict[int, int]:
    return {chunk.sequence.number: chunk.tokens for chunk in plan.chunks}

"""A worker's engine without the model: real scheduler, page table and policies, made-up tokens and time.

Covers steps and loads as events on a clock. Does not cover how long they take
(`pie.simulator.cost_model`), what is below device memory (`pie.simulator.tier`) or who asks
(`pie.simulator.cluster`, `.mock_worker`).

Steps that are alike are taken at once: until the first sequence ends or the prefill is through. A request
that comes in between, or a load that ends, ends them at the step under way.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence as Many
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import PageKey, RootKey
from pie.policies.manager import RetentionManager
from pie.policies.retention import NO_ROOT
from pie.simulator.clock import Clock, Timer
from pie.simulator.cost_model import CostModel
from pie.simulator.errors import SetupError, within
from pie.simulator.loads import Loads
from pie.simulator.trace import MOST_TOKENS
from pie.wire.messages import FinishReason, Load, TokenDelta
from pie.worker.load_choice import Loaded
from pie.worker.page_table import Below, Change, PageTable
from pie.worker.rates import StepTimes
from pie.worker.scheduler import Chunk, Limits, Scheduler, StepPlan
from pie.worker.sequence import Sequence, SequenceState
from pie.worker.working_set import WorkingSet

_MOST_STEPS = 10_000
_LEAST_PREFILL = 8
"""As in `pie.worker.engine`: prefill beside decode gets this part of a step's tokens at least."""


MOST_PAGES = 10_000_000
"""Pages in the device memory of all workers together: so many take a gigabyte here, and as many seconds, before
anything is in them."""
_MOST_PAGE_TOKENS = 1 << 20
_MOST_RUNNING = 100_000
_MOST_WAITING = 100_000_000
_MOST_TARGET_MS = 60_000


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine has and keeps to."""

    pages: int = 4_096
    page_tokens: int = 512
    max_running: int = 256
    max_waiting: int = 100_000
    step_tokens: int = 2_048
    step_target_ms: float = 50.0

    def check(self) -> None:
        """Raise `SetupError` where a number makes no sense."""
        within("pages", self.pages, 1, MOST_PAGES)
        within("page_tokens", self.page_tokens, 1, _MOST_PAGE_TOKENS)
        within("max_running", self.max_running, 1, _MOST_RUNNING)
        within("max_waiting", self.max_waiting, 0, _MOST_WAITING)
        within("step_tokens", self.step_tokens, 1, MOST_TOKENS)
        if self.step_tokens < self.max_running:
            raise SetupError(
                f"step_tokens must be at least max_running: {self.step_tokens} < {self.max_running}"
            )
        if not 0 < self.step_target_ms <= _MOST_TARGET_MS:
            raise SetupError(
                f"step_target_ms must be above 0 and at most {_MOST_TARGET_MS:,}, not {self.step_target_ms}"
            )


@dataclass(eq=False, slots=True)
class Job:
    """A request at an engine."""

    request_id: str
    root: RootKey
    tokens: array[int]
    """The prompt, until it is submitted."""
    max_tokens: int
    answer: int
    """The token that its answer is made of."""
    tenant_tag: str = ""
    session_tag: str = ""
    made: int = 0
    """Tokens of the answer so far."""


@dataclass(slots=True)
class EngineCounts:
    """What an engine has done."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    busy_s: float = 0.0


OnReport = Callable[[Many[TokenDelta], Load], None]


class MockEngine:
    """One worker's engine.

    Args:
        spec: What it has.
        cost: How long it takes.
        clock: The time.
        retention: Chooses victims in device memory.
        on_report: Told, after a step, what it made and how busy the engine is.
        on_changes: Told which pages are held now and which no longer.
        loads: Where pages can be loaded from.
        on_frozen: Told of pages that nobody held before, in the order of their sequence.
        below: What takes pages that leave.
        model: The root of the model whose pages they are, for policies.
        on_steps: Told when `next_load_s` has become another time.
    """

    def __init__(
        self,
        spec: EngineSpec,
        cost: CostModel,
        clock: Clock,
        *,
        retention: RetentionManager,
        on_report: OnReport,
        on_changes: Callable[[list[Change]], None],
        loads: Loads | None = None,
        on_frozen: Callable[[Sequence, list[int]], None] | None = None,
        below: Below | None = None,
        model: RootKey = NO_ROOT,
        on_steps: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_steps = on_steps
        self.spec = spec
        self.counts = EngineCounts()
        self.table = PageTable(
            spec.pages,
            cost.bytes_of(spec.page_tokens),
            Part.FULL,
            retention,
            below,
            model,
            spec.page_tokens,
        )
        self._cost = cost
        self._clock = clock
        self._on_report = on_report
        self._on_changes = on_changes
        self._on_frozen = on_frozen
        self._loads = loads
        self._times = StepTimes()
        self._scheduler = Scheduler(
            self.table,
            Limits(
                max_running=spec.max_running,
                max_waiting=spec.max_waiting,
                step_tokens=spec.step_tokens,
            ),
            page_tokens=spec.page_tokens,
            load_wish=self._load_wish,
        )
        self._jobs: dict[int, Job] = {}
        self._sequences: dict[str, Sequence] = {}
        self._submitted = self._told = 0
        self._under_way: _Steps | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return self._scheduler.is_empty

    def take_load(self) -> Load | None:
        """Return how busy it was at the end of the latest step that brought tokens; None if that was told.

        Steps that are alike are taken at once here; a worker tells its router with the tokens of each.
        """
        steps = self._under_way
        if steps is None or not steps.decode:
            return None
        passed, told = steps.passed(self._clock.now_s()), steps.told
        steps.told = passed
        return self.load() if passed > told else None

    @property
    def next_load_s(self) -> float | None:
        """When `take_load` has something new; None where that is not before other steps."""
        steps = self._under_way
        if steps is None or not steps.decode or steps.told >= steps.count - 1:
            return None
        return steps.began_s + steps.step_s * (steps.told + 1)

    @property
    def context_tokens(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.spec.pages * self.spec.page_tokens

    def submit(self, job: Job) -> bool:
        """Take a request; False where the queue is full. What is too long for it is the caller's."""
        assert len(job.tokens) + job.max_tokens <= self.context_tokens
        self._submitted += 1
        if self._under_way is not None:
            self._settle(self._under_way)
        working_set = WorkingSet(
            self.table,
            job.root,
            job.tokens,
            page_tokens=self.spec.page_tokens,
            tenant_tag=job.tenant_tag,
            session_tag=job.session_tag,
        )
        sequence = Sequence(self._submitted, working_set, self._clock.now_s())
        if not self._scheduler.submit(sequence):
            return False
        # The working set has them: of a long queue both would take gigabytes.
        job.tokens = array("I")
        self._jobs[sequence.number] = job
        self._sequences[job.request_id] = sequence
        if self._under_way is None:
            self._step()
        else:
            self._cut(self._under_way)
        return True

    def cancel(self, request_id: str) -> None:
        """Give a request up; harmless where it is not here."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            del self._jobs[sequence.number]
            self._scheduler.finish(sequence)

    def let_go(self, keys: Many[PageKey]) -> set[PageKey]:
        """Let those pages go that nobody uses, the last first; return those that are not held any more."""
        gone = {key for key in reversed(keys) if self.table.let_go(key)}
        self._tell_changes()
        return gone

    def load(self) -> Load:
        """Return how busy it is, as of the last step that has ended."""
        steps = self._under_way
        computed = 0
        if steps is not None:
            computed = steps.prefill * max(0, steps.passed(self._clock.now_s()) - steps.settled)
        return Load(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            waiting_tokens=self._scheduler.waiting_tokens - computed,
            free_pages=self.table.available,
            total_pages=self.table.total,
            prefill_tokens_per_s=self._times.prefill.per_s,
            step_ms=self._times.step_s * 1e3,
        )

    def check(self) -> None:
        """Raise `AssertionError` where table, scheduler and jobs contradict each other."""
        self._scheduler.check()
        self.table.check([list(one.working_set.pages) for one in self._scheduler.sequences()])
        assert len(self._jobs) == len(self._sequences)

    def _step(self) -> None:
        """Begin the next step; nothing where there is nothing to run."""
        now_s = self._clock.now_s()
        least = max(self.spec.page_tokens, self.spec.step_tokens // _LEAST_PREFILL)
        target_s = self.spec.step_target_ms / 1e3
        plan = self._scheduler.plan(
            now_s,
            prefill_tokens=self._times.prefill_tokens(target_s, least=least),
            tokens_per_s=self._times.prefill.per_s,
        )
        for sequence in plan.loads:
            assert self._loads is not None
            self._loads.begin(sequence, self._load_ended)
        self._tell_changes()
        if not plan.chunks:
            return
        prefill = sum(chunk.tokens for chunk in plan.chunks if chunk.tokens > 1)
        decode = plan.tokens - prefill
        step_s = self._cost.step_s(prefill, decode)
        count = self._alike(plan.chunks)
        steps = self._under_way = _Steps(plan, prefill, decode, now_s, step_s, count)
        steps.timer = self._clock.at(steps.end_s, self._end)
        if count > 1:
            self._on_steps()

    def _alike(self, chunks: Many[Chunk]) -> int:
        """Return how many steps like this one come after each other if nothing happens.

        One prefill that goes on and any number of sequences that do: whoever else waits gets its turn
        when one of them is through.
        """
        taken = {chunk.sequence.number for chunk in chunks}
        for one in self._scheduler.sequences():
            left_out = one.state is SequenceState.RUNNING and one.number not in taken
            # Each step may bring a page that somebody waits for; who lacks one token has its turn in the next.
            if one.awaited or (left_out and one.missing == 1):
                return 1
        count, prefills = _MOST_STEPS, 0
        for chunk in chunks:
            if chunk.tokens == 1:
                job = self._jobs[chunk.sequence.number]
                # A first token is told at once.
                count = min(count, job.max_tokens - job.made) if job.made else 1
            else:
                prefills += 1
                # What is left in the end may fit into one step that is longer by less than a page.
                count = min(count, (chunk.sequence.missing - self.spec.page_tokens) // chunk.tokens)
                # One that was cut at a page's end is followed by a longer one, the last one draws a
                # token, and of two prefills the first one is through.
                whole = not chunk.tokens % self.spec.page_tokens
                whole = whole and not chunk.sequence.working_set.computed % self.spec.page_tokens
                count = count if whole and not chunk.draws and prefills == 1 else 1
        while count > 1 and not self._has_room(chunks, count):
            count //= 2
        return max(1, count)

    def _has_room(self, chunks: Many[Chunk], steps: int) -> bool:
        needed = sum(
            chunk.sequence.working_set.pages_for(
                chunk.sequence.working_set.computed + chunk.tokens * steps
            )
            for chunk in chunks
        )
        return needed <= self.table.available

    def _cut(self, steps: _Steps) -> None:
        """End many steps with the one that is under way."""
        passed_s = self._clock.now_s() - steps.began_s
        count = max(1, math.ceil(passed_s / steps.step_s))
        if count < steps.count and steps.timer is not None:
            steps.timer.cancel()
            steps.count = count
            steps.timer = self._clock.at(steps.end_s, self._end)

    def _settle(self, steps: _Steps) -> None:
        """Take in the pages that have been computed by now: who comes finds them, as step by step.

        Those that had to leave for it are gone by now, too.
        """
        now_s = self._clock.now_s()
        passed = steps.passed(now_s)
        if steps.count > 1:
            for chunk in steps.plan.chunks:
                begun = (passed - (steps.settled if chunk.tokens > 1 else 0) + 1) * chunk.tokens
                if chunk.sequence.state is SequenceState.RUNNING:
                    working_set = chunk.sequence.working_set
                    grown = working_set.grow(working_set.computed + begun, now_s)
                    assert grown, "there was room for all of these steps"
            self._tell_changes()
        if steps.prefill and passed > steps.settled:
            for chunk in steps.plan.chunks:
                if chunk.tokens > 1:
                    self._take_in(steps, chunk, passed - steps.settled, now_s)
            steps.settled = passed
            self._tell_changes()

    def _end(self) -> None:
        """Take in what the steps under way made, and begin the next."""
        steps = self._under_way
        assert steps is not None
        self._under_way = None
        now_s = self._clock.now_s()
        # One by one: means move with each step, and what fits into the next one depends on them.
        for _ in range(steps.count):
            self._times.saw(
                prefill_tokens=steps.prefill, decode_tokens=steps.decode, seconds=steps.step_s
            )
        counts = self.counts
        counts.steps += steps.count
        counts.prefill_tokens += steps.prefill * steps.count
        counts.decode_tokens += steps.decode * steps.count
        counts.busy_s += steps.step_s * steps.count
        deltas: list[TokenDelta] = []
        for chunk in steps.plan.chunks:
            count = steps.count - (steps.settled if chunk.tokens > 1 else 0)
            delta = self._take_in(steps, chunk, count, now_s)
            if delta is not None:
                deltas.append(delta)
        self._tell_changes()
        self._step()
        if deltas or self._told != self._submitted or self.is_idle:
            self._told = self._submitted
            self._on_report(deltas, self.load())

    def _take_in(self, steps: _Steps, chunk: Chunk, count: int, now_s: float) -> TokenDelta | None:
        """Take in one chunk of `count` steps; return what to tell of it."""
        job = self._jobs.get(chunk.sequence.number)
        # One that was cancelled, or suspended for another's sake, is none of this step's.
        if not count or job is None or chunk.sequence.state is not SequenceState.RUNNING:
            return None
        if chunk.tokens > 1:
            chunk.sequence.prefill_s += steps.step_s * count * chunk.tokens / steps.prefill
        return self._advance(job, chunk, count, now_s, grows=steps.count > 1)

    def _advance(
        self, job: Job, chunk: Chunk, steps: int, now_s: float, *, grows: bool
    ) -> TokenDelta | None:
        """Take in one chunk, `steps` times where it decodes; return what to tell of it."""
        sequence, working_set = chunk.sequence, chunk.sequence.working_set
        # There is a place for the first of several steps alone.
        if grows:
            if chunk.draws:
                for _ in range(steps - 1):
                    working_set.append(job.answer)
            chunk = Chunk(sequence, chunk.tokens * steps, draws=chunk.draws)
            grown = working_set.grow(working_set.computed + chunk.tokens, now_s)
            assert grown, "there was room for all of these steps"
        new = self._scheduler.advance(chunk, now_s)
        if new and self._on_frozen is not None:
            self._on_frozen(sequence, new)
        if not chunk.draws:
            return None
        working_set.append(job.answer)
        started = None if job.made else sequence.started(now_s)
        job.made += steps
        is_last = job.made >= job.max_tokens
        if is_last:
            self._scheduler.finish(sequence)
            del self._jobs[sequence.number], self._sequences[job.request_id]
        return TokenDelta(
            request_id=job.request_id,
            token_ids=(job.answer,) * steps,
            text="",
            finish_reason=FinishReason.LENGTH if is_last else None,
            started=started,
        )

    def _load_wish(self, sequence: Sequence) -> int:
        return 0 if self._loads is None else self._loads.wish(sequence, self._times.prefill)

    def _load_ended(self, sequence: Sequence, loaded: list[Loaded]) -> None:
        """Go on with a sequence whose pages have come."""
        pages = sum(one.pages for one in loaded)
        self._scheduler.loaded(sequence, pages, self._clock.now_s(), loaded)
        self._tell_changes()
        if self._under_way is None:
            self._step()
        else:
            self._cut(self._under_way)

    def _tell_changes(self) -> None:
        changes = self.table.take_changes()
        if changes:
            self._on_changes(changes)


@dataclass(slots=True)
class _Steps:
    """Steps under way, all alike."""

    plan: StepPlan
    prefill: int
    decode: int
    began_s: float
    step_s: float
    count: int
    timer: Timer | None = None
    told: int = 0
    settled: int = 0
    """Those whose prefill has been taken in."""

    @property
    def end_s(self) -> float:
        return self.began_s + self.step_s * self.count

    def passed(self, now_s: float) -> int:
        """Return how many of them have ended; the last one ends with all."""
        return min(self.count - 1, int((now_s - self.began_s) / self.step_s))

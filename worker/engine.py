"""One engine: takes commands, runs steps, reports tokens.

Covers a step (schedule, run, finish) and the requests that it serves. Does not cover threads and
sockets (`pie.worker.engine_thread`, `pie.worker.service`): whoever owns an engine calls it from
one thread.

A failure in a step ends that step's requests, each with its reason, and nothing else; where programs have
passes in it, those end, and the requests run again without them. Pages that a
failed pass wrote are not frozen: they are gone with their request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import RootKey, tenant_root
from pie.wire.messages import RefusalCode, Refused, TokenDelta
from pie.worker.batch import Pass
from pie.worker.commands import (
    CancelAll,
    CancelOne,
    Command,
    LoadEnded,
    StepReport,
    StoreEnded,
    Submit,
)
from pie.worker.counters import Counters
from pie.worker.departed import Departed
from pie.worker.figures import Figures
from pie.worker.forks import Forks, parent_of
from pie.worker.generation import Generation, RequestKey, Vocabulary
from pie.worker.grammar import GrammarFailedError
from pie.worker.lending import Lending
from pie.worker.loadable import Loadable
from pie.worker.offload import Offload
from pie.worker.outcome import Drawn, Outcome, StepRunner, attempt
from pie.worker.page_table import Change, PageTable
from pie.worker.programs.commands import ProgramBegan, ProgramCall, ProgramEnded
from pie.worker.programs.lane import ProgramLane
from pie.worker.programs.loading import ProgramLoad
from pie.worker.rates import StepTimes
from pie.worker.scheduler import Chunk, Limits, Scheduler, StepPlan
from pie.worker.sequence import Sequence
from pie.worker.state_table import StateTable
from pie.worker.stores import (
    PageToStore,
    StoreQueue,
    batch_pages,
    page_to_store,
    snapshot_to_store,
)
from pie.worker.suspended import SuspendedPages
from pie.worker.working_set import ForkMemory, WorkingSet

log = logging.getLogger("pie.worker.engine")

_FORKS_COME_S = 0.02
"""How long a request waits for its forks, sent right behind it: a short prompt is computed sooner."""
_LEAST_PREFILL = 8
"""Prefill beside decode gets this part of a step's tokens at least, however slow the decode: else
new requests would wait for the running ones to end."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine keeps to."""

    scheduler: Limits
    step_target_s: float
    """How long a step should take while sequences decode."""
    store_queue_pages: int


class Engine:
    """Runs requests over one model and one page table.

    Args:
        runner: The model.
        table: The pages, at least `vocabulary.context_tokens` tokens in all; none for a model without
            attention.
        root: The model's root key.
        page_tokens: Tokens in a page.
        vocabulary: Tokenizer, end tokens and context length.
        limits: What it keeps to.
        memory: Where pages lie, for forks.
        on_changes: Told, after each step, which pages are held now and which no longer.
        states: The states of a recurrent model.
        clock: Seconds, from anywhere, going forward.
        debug: Check all invariants whenever idle.
    """

    def __init__(
        self,
        runner: StepRunner,
        table: PageTable,
        root: RootKey,
        *,
        page_tokens: int,
        vocabulary: Vocabulary,
        limits: EngineLimits,
        memory: ForkMemory,
        on_changes: Callable[[list[Change]], None] = lambda _: None,
        states: StateTable | None = None,
        clock: Callable[[], float] = time.monotonic,
        debug: bool = False,
    ) -> None:
        assert not table.total or table.total * page_tokens >= vocabulary.context_tokens
        assert table.total or states is not None
        self._runner = runner
        self._table = table
        self._states = states
        self.tables = (table,) if states is None else (table, states.slots)
        """What its policies choose victims in; the step thread's alone."""
        self.lending = Lending(self.tables)
        self._root = root
        self._page_tokens = page_tokens
        self._vocabulary = vocabulary
        self._limits = limits
        self._memory = memory
        self._on_changes = on_changes
        self._clock = clock
        self._debug = debug
        self._offload: Offload | None = None
        self._suspended: SuspendedPages | None = None
        self._programs: ProgramLane | None = None
        self._scheduler = Scheduler(
            table,
            limits.scheduler,
            page_tokens=page_tokens,
            load_wish=self._load_wish,
            states=states,
        )
        self._stores = StoreQueue(
            table,
            limit_pages=limits.store_queue_pages,
            batch_pages=batch_pages(limits.scheduler.step_tokens // page_tokens, table.total),
            states=states,
        )
        self._departed = Departed(states_alone=not table.total)
        self._generations: dict[RequestKey, Generation] = {}
        self._forks = Forks()
        self._by_number: dict[int, Generation] = {}
        self._submitted = 0
        self._times = StepTimes()
        self._counters = Counters()
        self._figures = Figures(
            self._scheduler, table, states, self._stores, self._times, self._counters
        )
        self.load = self._figures.load()
        """As of the step under way; may be read from any thread."""
        self._report = StepReport(self.load)
        self.status = self._figures.status()
        """As of the last step; may be read from any thread."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is left and no transfer under way."""
        waits = self._programs is not None and not self._programs.roster.is_idle
        return self._scheduler.is_empty and not self._stores.is_busy and not waits

    @property
    def rest_s(self) -> float | None:
        """How long it may rest when idle; None where only a command gives it something to do."""
        return self._stores.due_in_s

    def attach(self, offload: Offload, suspended: SuspendedPages | None = None) -> None:
        """Use lower tiers and a pool from now on, and keep there what sequences had that yield."""
        self._offload = self._figures.offload = offload
        self._table.below = offload.below(self._stores, offload.layout.attention_parts)
        if self._states is not None:
            self._states.slots.below = offload.below(self._stores, (Part.STATE,))
        self._suspended = self._figures.suspended = suspended
        if suspended is not None:
            self._scheduler.suspender = suspended

    def run_programs(self, lane: ProgramLane) -> None:
        """Run users' programs too from now on."""
        self._programs = lane
        lane.roster.on_new_page = self._put_store
        lane.load_wish, lane.load = self._load_wish, self._load

    def handle(self, command: Command) -> None:
        """Take one command."""
        match command:
            case Submit():
                self._submit(command)
            case CancelOne(owner, request_id):
                self._cancel((owner, request_id))
            case CancelAll(owner):
                for key in [k for k in self._generations if owner is None or k[0] == owner]:
                    self._cancel(key)
            case LoadEnded():
                self._load_ended(command)
            case StoreEnded(stored, there, again):
                self._stores.ended(stored, there, again)
            case ProgramBegan() | ProgramCall() | ProgramEnded():
                assert self._programs is not None
                self._programs.roster.handle(command, self._clock())
            case _:
                raise AssertionError(f"{command} is not for the engine")

    def step(self) -> bool:
        """Run one step; False where there was nothing to run."""
        now_s = self._clock()
        self._expire(now_s)
        rate, allowed = self._times.prefill.per_s, self._prefill_tokens()
        plan = self._scheduler.plan(now_s, prefill_tokens=allowed, tokens_per_s=rate)
        self.load = self._figures.load()
        for sequence in plan.loads:
            self._load(sequence)
        passes = self._plan_programs(plan, now_s)
        if plan.chunks or passes:
            self._run(plan, passes)
        self._store()
        changes = self._table.take_changes()
        if self._states is not None:
            changes += self._states.take_changes()
        self._departed.apply(changes, self._table.take_opaque())
        if changes:
            self._on_changes(changes)
        if self._debug and self.is_idle:
            self.check()
        self.load, self.status = self._figures.load(), self._figures.status()
        return bool(plan.chunks or passes)

    def take_report(self) -> StepReport | None:
        """Return what there is to tell since the last call; None where it is nothing."""
        report = self._report
        idle = self.is_idle
        if self._programs is not None:
            report.programs = self._programs.roster.take_answers()
        told = bool(report.deltas or report.refused or report.programs)
        told |= report.submitted != self._submitted
        if not told and not idle:
            return None
        report.load = self.load = self._figures.load()
        report.submitted = self._submitted
        report.idle = idle
        self._report = StepReport(report.load, self._submitted)
        return report

    def check(self) -> None:
        """Raise `AssertionError` where table, scheduler and requests contradict each other."""
        self._scheduler.check()
        users = [list(one.working_set.pages) for one in self._scheduler.sequences()]
        programs, states = list[int](), list[int]()
        if self._programs is not None:
            self._programs.roster.check()
            programs = self._programs.roster.users()
            states = self._programs.roster.state_users()
        lent = self.lending.users
        self._table.check([*users, self._stores.in_flight, programs, lent(self._table)])
        if self._suspended is not None:
            self._suspended.check()
        if self._states is not None:
            slots = [one.working_set.state_slots for one in self._scheduler.sequences()]
            lent_states = lent(self._states.slots)
            self._states.check([*slots, self._stores.states_in_flight, states, lent_states])
        assert {g.sequence.number for g in self._generations.values()} == set(self._by_number)
        forking = {one for one in self._by_number.values() if one.is_forking}
        assert set(self._forks.waiting()) == forking

    def _submit(self, command: Submit) -> None:
        self._submitted += 1
        key = (command.owner, command.request.request_id)
        if key in self._generations:
            self._refuse(key, RefusalCode.BAD_MESSAGE, "a request with this id is running")
            return
        try:
            generation = self._begin(command)
        except Exception as error:
            log.exception("a request could not be begun")
            self._refuse(key, RefusalCode.FAILED, f"{type(error).__name__}: {error}")
            return
        if generation.is_spent:
            self._counters.requests += 1
            self._tell(generation, generation.spent())
            return
        parent = parent_of(generation, self._generations)
        if parent is None:
            taken = self._scheduler.submit(generation.sequence)
        else:
            taken = self._scheduler.submit_fork(generation.sequence)
        if not taken:
            self._refuse(
                key,
                RefusalCode.OVERLOADED,
                f"{self._scheduler.waiting} requests are waiting already",
                retry_after_s=self._times.retry_after_s(self._scheduler.waiting_tokens),
            )
            return
        self._counters.requests += 1
        self._generations[key] = generation
        self._by_number[generation.sequence.number] = generation
        if command.request.forks > 0:
            generation.sequence.held_until_s = self._clock() + _FORKS_COME_S
        if parent is not None:
            self._forks.add(parent, generation)
            if len(self._forks.of(parent)) >= parent.request.forks:
                parent.sequence.held_until_s = 0.0

    def _begin(self, command: Submit) -> Generation:
        request = command.request
        working_set = WorkingSet(
            self._table,
            tenant_root(self._root, salt=request.salt),
            command.tokens,
            page_tokens=self._page_tokens,
            tenant_tag=request.tenant_tag,
            session_tag=request.session_tag,
            states=self._states,
        )
        sequence = Sequence(self._submitted, working_set, self._clock(), request.priority)
        return Generation(command.owner, request, sequence, self._vocabulary, command.constraint)

    def _cancel(self, key: RequestKey) -> None:
        generation = self._generations.get(key)
        if generation is not None:
            self._counters.cancelled += 1
            self._forget(generation)

    def _load_ended(self, ended: LoadEnded) -> None:
        assert self._offload is not None
        self._offload.learn(ended)
        one, now_s = ended.sequence, self._clock()
        for came in ended.sources:
            self._counters.pages_loaded[came.tier] += came.pages
        if isinstance(one, Sequence):
            self._scheduler.loaded(
                one, ended.pages, now_s, ended.sources, has_state=ended.has_state
            )
        elif self._programs is not None:
            assert isinstance(one, ProgramLoad)
            self._programs.loaded(one, ended.pages, now_s, has_state=ended.has_state)

    def _expire(self, now_s: float) -> None:
        for generation in list(self._generations.values()):
            if generation.deadline_s is not None and now_s >= generation.deadline_s:
                self._fail(generation, "the request's deadline passed")

    def _plan_programs(self, plan: StepPlan, now_s: float) -> list[Pass]:
        if self._programs is None:
            return []
        prefill = sum(chunk.tokens for chunk in plan.chunks if chunk.tokens > 1)
        allowed = self._prefill_tokens() if plan.chunks else self._limits.scheduler.step_tokens
        under_way = [key for one in self._scheduler.computing() for key in one.next_keys]
        # Where requests take all of it, programs get a part on top: nobody is starved.
        left = max(allowed - prefill, allowed // _LEAST_PREFILL)
        return self._programs.plan(prefill_tokens=left, now_s=now_s, under_way=under_way)

    def _run(self, plan: StepPlan, passes: list[Pass]) -> None:
        started_s = self._clock()
        outcome, reason = attempt(
            self._runner,
            [(chunk, self._drawing(chunk)) for chunk in plan.chunks],
            self._vocabulary.tokenizer.token_bytes,
            passes,
        )
        if reason and self._programs is not None:
            self._programs.fail(f"the model failed in this step: {reason}", self._clock())
        if outcome is None:
            for chunk in plan.chunks:
                generation = self._by_number[chunk.sequence.number]
                self._fail(generation, f"the model failed in this request's step: {reason}")
            return
        sizes = [chunk.tokens for chunk in plan.chunks]
        sizes += [] if reason else [len(one.token_ids) for one in passes]
        prefill = sum(size for size in sizes if size > 1)
        decode = sum(sizes) - prefill
        now_s = self._clock()
        self._times.saw(prefill_tokens=prefill, decode_tokens=decode, seconds=now_s - started_s)
        self._counters.steps += 1
        self._counters.prefill_tokens += prefill
        self._counters.decode_tokens += decode
        for index, chunk in enumerate(plan.chunks):
            generation = self._by_number[chunk.sequence.number]
            if chunk.tokens > 1:
                chunk.sequence.prefill_s += (now_s - started_s) * chunk.tokens / prefill
            try:
                self._finish(generation, chunk, index, outcome, now_s)
            except GrammarFailedError as error:
                log.warning("a request failed after its step: %s", error)
                self._fail(generation, f"{error}")
            except Exception as error:
                log.exception("a request failed after its step")
                self._fail(generation, f"{type(error).__name__}: {error}")
        if self._programs is not None:
            first = len(plan.chunks)
            self._programs.finish(outcome.output, first, outcome.finite[first:], now_s)

    def _finish(
        self, generation: Generation, chunk: Chunk, index: int, outcome: Outcome, now_s: float
    ) -> None:
        """Take in what one chunk gave."""
        if not outcome.finite[index]:
            self._fail(generation, "the model's output is not a number")
            return
        working_set = chunk.sequence.working_set
        for page in self._scheduler.advance(chunk, now_s, is_pure=outcome.pure[index]):
            self._put_store(page_to_store(working_set, page))
        self._put_store(snapshot_to_store(working_set))
        generation.read_prompt(outcome.prompts.get(index, ()))
        if not chunk.draws:
            return
        own, *drawn = outcome.drawn[index]
        # Before the parent goes on: a fork has the prompt, and not what the parent drew after it.
        for child, one in zip(self._forks.of(generation), drawn, strict=True):
            self._forks.remove(child)
            self._fork(chunk.sequence, child, one, now_s)
        self._push(generation, own, now_s)

    def _fork(self, parent: Sequence, child: Generation, drawn: Drawn, now_s: float) -> None:
        """Let a waiting fork go on from its parent; what goes wrong with it is its own."""
        try:
            if self._scheduler.fork(parent, child.sequence, self._memory, now_s):
                self._counters.forks += 1
                self._push(child, drawn, now_s)
        except Exception as error:
            log.exception("a fork could not be begun")
            if child.key in self._generations:
                self._fail(child, f"{type(error).__name__}: {error}")

    def _drawing(self, chunk: Chunk) -> list[Generation]:
        """Return the generations that draw a token after a chunk: its own, and its forks."""
        generation = self._by_number[chunk.sequence.number]
        return [generation, *(self._forks.of(generation) if chunk.draws else ())]

    def _push(self, generation: Generation, drawn: Drawn, now_s: float) -> None:
        """Give a generation its next token."""
        request, sequence, first = generation.request, generation.sequence, generation.is_first
        delta = generation.push(drawn.token, drawn.logprobs, now_s)
        if first:
            self._counters.cached_tokens_device += min(request.output_start, sequence.cached_device)
            for tier, tokens in sequence.cached_by_load.items():
                self._counters.cached_tokens_loaded[tier] += min(request.output_start, tokens)
        self._tell(generation, delta)
        if delta.finish_reason is not None:
            self._counters.finished += 1
            self._forget(generation)

    def _fail(self, generation: Generation, reason: str) -> None:
        self._counters.failed += 1
        self._tell(generation, generation.failed(reason))
        self._forget(generation)

    def _forget(self, generation: Generation) -> None:
        self._forks.remove(generation)
        self._scheduler.finish(generation.sequence)
        del self._generations[generation.key]
        del self._by_number[generation.sequence.number]
        heir, *others = self._forks.take(generation) or (None,)
        if heir is not None:
            # The first of its forks computes the prompt in its place.
            self._scheduler.fork_alone(heir.sequence)
            for other in others:
                self._forks.add(heir, other)

    def _tell(self, generation: Generation, delta: TokenDelta) -> None:
        self._report.deltas.setdefault(generation.owner, []).append(delta)

    def _refuse(
        self,
        key: RequestKey,
        code: RefusalCode,
        message: str,
        retry_after_s: float | None = None,
    ) -> None:
        self._counters.refused += 1
        self._report.refused.append((key[0], Refused(key[1], code, message, retry_after_s)))

    def _load_wish(self, one: Loadable) -> int:
        if isinstance(one, Sequence):
            self._departed.note(one, held=self._table.has)
        return 0 if self._offload is None else self._offload.wish(one, self._times.prefill)

    def _load(self, one: Loadable) -> None:
        assert self._offload is not None
        self._offload.load(one, self._times.prefill)

    def _put_store(self, page: PageToStore | None) -> None:
        if self._offload is not None and self._offload.stores_as_made and page is not None:
            self._stores.put(page)

    def _store(self) -> None:
        if self._offload is not None:
            self._offload.look_ahead(self._scheduler.next_waiting())
            if batch := self._stores.next_batch():
                self._offload.store(batch)

    def _prefill_tokens(self) -> int:
        least = max(self._page_tokens, self._limits.scheduler.step_tokens // _LEAST_PREFILL)
        return self._times.prefill_tokens(self._limits.step_target_s, least=least)

"""Programs' working sets, and their calls in order.

Covers which call may be carried out when, and carrying out those that need no pass. Does not cover
which passes run in a step (`pie.worker.programs.lane`), one sequence's way through a pass
(`pie.worker.programs.run`) or processes (`pie.worker.programs.host`).

Calls that name a working set in common are carried out in order: a call waits until it is the first
on each of its sets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from pie.page.key import RootKey, tenant_root
from pie.wire.frames import Buffer
from pie.wire.programs import (
    CallFailed,
    CancelCall,
    CloseSet,
    CompactSet,
    Drawn,
    DropSlots,
    ForkSet,
    GenerateTokens,
    OpenSet,
    ParkSet,
    PassInput,
    RunPass,
    SealSet,
    SetState,
    Trouble,
)
from pie.worker.draws import fresh_seed
from pie.worker.generation import Vocabulary
from pie.worker.programs.answers import slots_frame
from pie.worker.programs.attempt import Attempt
from pie.worker.programs.calls import (
    ModelShape,
    PassCall,
    bad,
    check_drawing,
    check_tokens,
    may_ask,
    read_inputs,
    read_ints,
)
from pie.worker.programs.commands import (
    Carried,
    EngineAnswer,
    ProgramAnswer,
    ProgramBegan,
    ProgramCall,
    ProgramCommand,
    ProgramEnded,
)
from pie.worker.programs.continuation import Continuation
from pie.worker.programs.ledger import PageLedger, StateLedger
from pie.worker.programs.loading import ProgramLoad
from pie.worker.programs.parking import ParkingLot
from pie.worker.programs.run import Run
from pie.worker.programs.slots import SlotMemory, SlotSet
from pie.worker.programs.trouble import CallError, recurrent
from pie.worker.sampling import SamplingRow
from pie.worker.stores import PageToStore

log = logging.getLogger("pie.worker.programs.roster")

_MOST_SETS = 4096
_MOST_SCORE_BYTES = 64 << 20
"""Of one pass."""
"""Working sets of one program."""
_MOST_QUEUED = 4096
"""Calls that wait on one working set."""
_MOST_STOPS = 256
_MOST_STOP_CHARS = 16_384


class Job:
    """A call that has not been answered for good."""

    def __init__(self, program: Program, call: ProgramCall, sets: tuple[int, ...]) -> None:
        self.program = program
        self.call = call
        self.sets = sets
        self.runs: list[Run] = []
        self.attempts: list[Attempt] = []
        """What it has begun to do to working sets."""
        self.continuation: Continuation | None = None
        self.is_cancelled = False
        self.failure: CallError | None = None
        """Why it is about to end: what is planned for it is of no use any more."""
        self.is_over = False

    @property
    def number(self) -> int:
        """The call's number."""
        return self.call.call.call


class Program:
    """What one program has."""

    def __init__(self, name: str, root: RootKey, tenant_tag: str, session_tag: str) -> None:
        self.name = name
        self.root = root
        self.tenant_tag = tenant_tag
        self.session_tag = session_tag
        self.sets: dict[int, SlotSet] = {}
        self.queues: dict[int, deque[Job]] = {}
        """Jobs on each working set, in order."""
        self.jobs: dict[int, Job] = {}
        """The same, by their calls' numbers."""

    def running(self) -> Iterator[Job]:
        """List the jobs that have sequences to run."""
        seen: set[int] = set()
        for queue in self.queues.values():
            if queue and queue[0].runs and id(queue[0]) not in seen:
                seen.add(id(queue[0]))
                yield queue[0]

    def set(self, number: int) -> SlotSet:
        """Return a working set.

        Raises:
            CallError: There is none with this number.
        """
        found = self.sets.get(number)
        if found is None:
            raise bad(f"there is no working set {number}")
        return found


class Roster:
    """All programs of an engine.

    Args:
        ledger: Where pages come from.
        root: The model's root key.
        memory: Where pages lie.
        shape: The model.
        lot: Where parked pages wait.
        page_tokens: Tokens in a page.
        vocabulary: Tokenizer, end tokens and context.
        states: Where a recurrent model's states come from.
    """

    def __init__(
        self,
        ledger: PageLedger,
        root: RootKey,
        memory: SlotMemory,
        shape: ModelShape,
        lot: ParkingLot,
        *,
        page_tokens: int,
        vocabulary: Vocabulary,
        states: StateLedger | None = None,
    ) -> None:
        self.programs: dict[str, Program] = {}
        self.loads: list[ProgramLoad] = []
        """Those under way, those that nobody wants any more included."""
        self.states = states
        self._ledger = ledger
        self._root = root
        self._memory = memory
        self._lot = lot
        self._shape = shape
        self._page_tokens = page_tokens
        self._vocabulary = vocabulary
        self._answers: list[ProgramAnswer] = []
        self.on_new_page: Callable[[PageToStore], None] = lambda _: None
        """Told of pages and snapshots that were frozen and that nobody held before."""
        self._failed: list[Job] = []
        self._numbers = 0

    @property
    def is_idle(self) -> bool:
        """Whether no program waits for anything."""
        waits = any(any(one.queues.values()) for one in self.programs.values())
        return not waits and not self.loads

    def handle(self, command: ProgramCommand, now_s: float) -> None:
        """Take one command."""
        match command:
            case ProgramBegan(name, salt, tenant_tag, session_tag):
                root = tenant_root(self._root, salt=salt)
                self.programs[name] = Program(name, root, tenant_tag, session_tag)
            case ProgramEnded(name):
                program = self.programs.pop(name, None)
                for job in () if program is None else program.running():
                    for attempt in job.attempts:
                        attempt.keep()
                for one in () if program is None else program.sets.values():
                    one.leave(self._lot)
                for load in self.loads:
                    load.is_wanted &= load.job.program is not program
            case ProgramCall(name):
                program = self.programs.get(name)
                if program is not None:
                    self._take(program, command, now_s)

    def take_answers(self) -> list[ProgramAnswer]:
        """Return what there is to say since the last call."""
        answers, self._answers = self._answers, []
        return answers

    def say(self, job: Job, message: EngineAnswer | Carried, frames: Sequence[Buffer] = ()) -> None:
        """Tell a job's program something; more follows."""
        self._answers.append(ProgramAnswer(job.program.name, message, frames))

    def end(self, job: Job, message: EngineAnswer, frames: Sequence[Buffer], now_s: float) -> None:
        """Answer a job for good, and carry out what waited for it.

        To be called when nothing of the job is planned: its working sets change with the next calls.
        """
        self._close(job, message, frames, now_s)
        self._go_on(job.program, job.sets, now_s)

    def fail(self, job: Job, error: CallError) -> None:
        """Note that a job has failed; `end_failed` ends it."""
        if job.failure is None and not job.is_over:
            job.failure = error
            self._failed.append(job)

    def end_failed(self, now_s: float) -> None:
        """End the jobs that have failed, nothing of which is planned any more."""
        while self._failed:
            job = self._failed.pop()
            if job.failure is not None and not job.is_over:
                self.end(job, job.failure.answer(job.number), (), now_s)

    def users(self) -> list[int]:
        """List the pages of every working set and load, as often as they are used."""
        sets = (one for program in self.programs.values() for one in program.sets.values())
        loading = [page for load in self.loads for page in load.reserved]
        jobs = (job for program in self.programs.values() for job in program.running())
        kept = [one.kept for job in jobs for one in job.attempts if one.kept is not None]
        return [page for one in sets for page in one.pages] + loading + kept

    def state_users(self) -> list[int]:
        """List the state slots of every working set and load, as often as they are used."""
        sets = [one for program in self.programs.values() for one in program.sets.values()]
        states = [one.state for one in sets] + [load.state for load in self.loads]
        return [slot for state in states if state is not None for slot in state.slots]

    def check(self) -> None:
        """Raise `AssertionError` where working sets and ledger contradict each other."""
        for program in self.programs.values():
            for one in program.sets.values():
                one.check()
        assert sorted(self.users()) == sorted(self._ledger.users())
        assert len(self._ledger) <= self._ledger.cap
        if self.states is not None:
            assert sorted(self.state_users()) == sorted(self.states.users())
            assert len(self.states) <= self.states.cap

    def _take(self, program: Program, call: ProgramCall, now_s: float) -> None:
        message = call.call
        if isinstance(message, CancelCall):
            self._cancel(program, message)
            return
        if isinstance(message, RunPass):
            sets = tuple(dict.fromkeys(one.set for one in message.inputs))
        elif isinstance(message, ForkSet):
            sets = (message.set, *message.forks)
        else:
            sets = (message.set,)
        job = Job(program, call, sets)
        try:
            self._open(program, message)
        except CallError as error:
            self.say(job, error.answer(message.call))
            return
        unknown = [one for one in sets if one not in program.queues]
        if unknown:
            self.say(job, bad(f"there is no working set {unknown[0]}").answer(message.call))
            return
        if any(len(program.queues[one]) >= _MOST_QUEUED for one in sets):
            full = bad(f"{_MOST_QUEUED} calls wait on this working set already: await some of them")
            self.say(job, full.answer(message.call))
            return
        for one in sets:
            program.queues[one].append(job)
        program.jobs[job.number] = job
        self._go_on(program, sets, now_s)

    def _open(self, program: Program, message: object) -> None:
        """Make queues for working sets that a call is to make."""
        match message:
            case OpenSet(_, number):
                new: tuple[int, ...] = (number,)
            case ForkSet(_, _, forks):
                new = forks
            case _:
                return
        if len(set(new)) < len(new) or any(one in program.queues for one in new):
            raise bad("a working set's number was given twice")
        if len(program.queues) + len(new) > _MOST_SETS:
            raise bad(f"a program may have {_MOST_SETS} working sets at a time: close some")
        program.queues.update((one, deque()) for one in new)

    def _go_on(self, program: Program, sets: Sequence[int], now_s: float) -> None:
        """Carry out what can be, of the calls on these working sets."""
        left = list(sets)
        while left:
            queue = program.queues.get(left[-1])
            job = queue[0] if queue else None
            if (
                job is None
                or job.runs
                or any(
                    program.queues[one][0] is not job for one in job.sets if one in program.queues
                )
            ):
                left.pop()
                continue
            try:
                self._carry_out(job, now_s)
            except Exception as error:
                # Nothing that a program asks may end the step thread, which is everybody's.
                if not isinstance(error, CallError):
                    log.exception("a program's call could not be carried out")
                    error = CallError(Trouble.FAILED, f"{type(error).__name__}: {error}")
                self._close(job, error.answer(job.number), (), now_s)
            else:
                if job.runs:
                    continue
                self._close(job, None, (), now_s)
            left.extend(one for one in job.sets if one not in left)

    def _close(
        self, job: Job, message: EngineAnswer | None, frames: Sequence[Buffer], now_s: float
    ) -> None:
        """End a job, which happens here and nowhere else, and once."""
        assert not job.is_over
        job.is_over, job.runs = True, []
        for attempt in job.attempts:
            if isinstance(message, CallFailed):
                attempt.take_back(now_s)
            else:
                attempt.keep()
        job.attempts = []
        for load in self.loads:
            load.is_wanted &= load.job is not job
        if message is not None:
            self.say(job, message, frames)
        elif isinstance(job.call.call, OpenSet | CloseSet):
            self.say(job, Carried(job.number))
        self._forget(job)

    def _carry_out(self, job: Job, now_s: float) -> None:
        """Do what a call asks, or begin to."""
        program = job.program
        self._bring_back(job, now_s)
        match job.call.call:
            case OpenSet(_, number):
                program.sets[number] = SlotSet(
                    self._ledger,
                    program.root,
                    page_tokens=self._page_tokens,
                    tenant_tag=program.tenant_tag,
                    session_tag=program.session_tag,
                    states=self.states,
                )
            case CloseSet(_, number):
                program.set(number).leave(self._lot)
                del program.sets[number]
            case ForkSet(_, number, forks):
                source = program.set(number)
                made = source.fork(len(forks), self._memory, now_s)
                program.sets.update(zip(forks, made, strict=True))
                self._tell_state(job, source)
            case RunPass():
                self._begin_pass(job, job.call.call, now_s)
            case GenerateTokens():
                self._begin_generation(job, job.call.call)
            case DropSlots() | CompactSet() | SealSet() | ParkSet():
                self._change(job, program.set(job.call.call.set), now_s)

    def _bring_back(self, job: Job, now_s: float) -> None:
        """End that sets are parked which a call uses."""
        if isinstance(job.call.call, ParkSet | CloseSet):
            return
        for number in job.sets:
            one = job.program.sets.get(number)
            if one is not None:
                one.bring_back(self._lot, now_s)
                for page in one.take_new_pages():
                    self.on_new_page(page)

    def _change(self, job: Job, one: SlotSet, now_s: float) -> None:
        """Do what a call asks that is about one set, and tell how it is then."""
        if self._shape.is_recurrent and isinstance(job.call.call, DropSlots | CompactSet):
            raise recurrent(f"no token can be taken out of it ({may_ask(self._shape)})")
        match job.call.call:
            case DropSlots():
                # One more than there are says as much as all, of which there may be millions.
                one.drop(read_ints(job.call.frames, one.next_slot + 1))
            case CompactSet():
                one.compact(self._memory, now_s)
            case SealSet():
                one.seal()
            case ParkSet():
                one.park(self._lot)
        self._tell_state(job, one)

    def _attempt(self, job: Job, one: SlotSet) -> Attempt:
        attempt = Attempt(one, self._ledger, self._memory)
        job.attempts.append(attempt)
        return attempt

    def _begin_pass(self, job: Job, message: RunPass, now_s: float) -> None:
        runs: list[Run] = []
        for call in read_inputs(message.inputs, job.call.frames, self._shape):
            target = job.program.set(call.set)
            attempt = self._attempt(job, target)
            if call.write is not None:
                attempt.write_again(call.write, now_s)
            sampling, row = call.wants.sampling, None
            if sampling is not None:
                seed = fresh_seed() if sampling.seed is None else sampling.seed
                row = SamplingRow(sampling, seed, call.wants.draw)
            run = self._new_run(call, target, row)
            run.check()
            runs.append(run)
        if sum(run.score_bytes for run in runs) > _MOST_SCORE_BYTES:
            raise bad(f"the scores of this pass would take more than {_MOST_SCORE_BYTES >> 20} MiB")
        job.runs = runs

    def _begin_generation(self, job: Job, message: GenerateTokens) -> None:
        target = job.program.set(message.set)
        if job.is_cancelled:
            nothing = Drawn(message.call, (), "", "cancelled", target.next_slot, len(target.pages))
            self.say(job, msgspec.structs.replace(nothing, cached_tokens=target.cached_tokens))
            return
        tokens = read_ints(job.call.frames, self._shape.context_tokens + 1)
        check_tokens(tokens, self._shape)
        check_drawing(message.sampling)
        if message.max_tokens < 1:
            raise bad("max_tokens must be at least 1")
        stops = (*message.stop, *message.stop_token_ids)
        if len(stops) > _MOST_STOPS or sum(map(len, message.stop)) > _MOST_STOP_CHARS:
            raise bad(f"more than {_MOST_STOPS} stops, or more than {_MOST_STOP_CHARS} characters")
        if not all(message.stop):
            raise bad("a stop string is empty")
        call = PassCall(
            message.set, tokens.tolist(), None, None, None, None, PassInput(message.set), tokens[:0]
        )
        reached = max(target.next_position, target.used)
        room = self._shape.context_tokens - reached - len(tokens)
        continuation = Continuation(
            message, tokens.tolist(), self._vocabulary, room, job.call.constraint
        )
        self._attempt(job, target)
        run = self._new_run(call, target, continuation.row)
        run.check()
        if room < 1:
            raise CallError(
                Trouble.CONTEXT_LENGTH,
                f"the model's context of {self._shape.context_tokens} has no room for another token",
            )
        job.continuation = continuation
        job.runs = [run]

    def _new_run(self, call: PassCall, target: SlotSet, row: SamplingRow | None) -> Run:
        self._numbers += 1
        return Run(self._numbers, call, target, self._shape, row)

    def _forget(self, job: Job) -> None:
        program = job.program
        program.jobs.pop(job.number, None)
        for one in job.sets:
            queue = program.queues.get(one)
            if queue and queue[0] is job:
                queue.popleft()
            if not queue and one not in program.sets:
                program.queues.pop(one, None)

    def _cancel(self, program: Program, message: CancelCall) -> None:
        job = program.jobs.get(message.target)
        if job is not None:
            job.is_cancelled = True
            if job.continuation is not None:
                job.continuation.is_cancelled = True

    def _tell_state(self, job: Job, one: SlotSet) -> None:
        state = SetState(
            call=job.number,
            length=one.next_slot,
            pages=len(one.pages),
            cached_tokens=one.cached_tokens,
        )
        self.say(job, state, [slots_frame(one)])

"""A small model's engine on its own thread, with programs and with tiers or a pool below it, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pie.wire.frames import Buffer
from pie.wire.messages import FinishReason, Sampling
from pie.wire.programs import (
    CallFailed,
    CloseSet,
    Drawn,
    GenerateTokens,
    OpenSet,
    ParkSet,
    PassDone,
    PassInput,
    RunPass,
    SetState,
)
from pie.worker.assembly import shape_of
from pie.worker.commands import StepReport
from pie.worker.generation import Vocabulary
from pie.worker.load_choice import LoadTier
from pie.worker.page_copies import PageNames
from pie.worker.page_pool import PagePool
from pie.worker.programs.commands import ProgramBegan, ProgramCall, ProgramEnded
from pie.worker.programs.lane import ProgramLane
from pie.worker.programs.ledger import PageLedger, StateLedger
from pie.worker.programs.parking import ParkingLot
from pie.worker.programs.roster import Roster
from pie.worker.runner import Runner
from tests.worker.engine.device import device
from tests.worker.engine.driver import EOS, Answer
from tests.worker.engine.test_pool_fed import SECRET, Subject
from tests.worker.engine.threaded import Threaded, Untimed
from tests.worker.engine.tiers import MakeTiers

GREEDY = Sampling(temperature=0)


class ThreadedLane(Threaded):
    """An engine whose requests and programs share pages, tiers and a pool. Start it with `start`."""

    def __init__(
        self,
        subject: Subject,
        *,
        tiers: MakeTiers = lambda _: None,
        pool: PagePool | None = None,
        pages: int = 20,
        slots: int = 8,
        secret: bytes | None = SECRET,
    ) -> None:
        model, size = subject.model, subject.page_tokens
        own = device(model, pages, slots=slots)
        super().__init__(
            Runner(model, own.arena),
            subject.tokenizer,
            pages=own.pages,
            states=own.states,
            page_tokens=size,
            page_bytes=own.arena.page_bytes,
            root=model.model_root,
            memory=own.arena,
            context_tokens=pages * size,
            step_tokens=128,
        )
        self.subject = subject
        self.ledger = PageLedger(self.table, own.pages)
        self.lot = ParkingLot(
            own.arena,
            model.layout.attention_parts,
            page_bytes=model.layout.page_bytes,
            budget_bytes=16 << 20,
            state_bytes=model.layout.state_bytes,
        )
        self.roster = Roster(
            self.ledger,
            model.model_root,
            own.arena,
            shape_of(model, pages * size),
            self.lot,
            page_tokens=size,
            vocabulary=Vocabulary(subject.tokenizer, frozenset({EOS}), pages * size),
            states=None if own.states is None else StateLedger(own.states, own.states.total),
        )
        self.engine.run_programs(
            ProgramLane(self.roster, self.ledger, page_tokens=size, max_rows=16)
        )
        names = PageNames(model.model_root, model.layout)
        attached = super().attach(
            pool,
            own.arena,
            names,
            limit_s=30.0,
            secret=secret,
            tiers=tiers,
            suspended_bytes=1 << 20,
        )
        attached.choice.times = {tier: Untimed() for tier in LoadTier}
        self.answered: dict[int, list[tuple[Any, Sequence[Buffer]]]] = {}
        self._calls = itertools.count(1)
        self._sets = itertools.count(1)

    def begin(self, program: str) -> None:
        self.put(ProgramBegan(program))

    def end(self, program: str) -> None:
        self.put(ProgramEnded(program))

    def call(self, message: Any, frames: Sequence[bytes] = (), program: str = "p") -> int:
        self.put(ProgramCall(program, message, list(frames)))
        return int(message.call)

    def open(self, program: str = "p") -> int:
        """Return the number of a new working set."""
        number = next(self._sets)
        self.call(OpenSet(next(self._calls), number), program=program)
        return number

    def start_answer(
        self, number: int, tokens: Sequence[int], count: int, program: str = "p"
    ) -> int:
        """Begin to generate; return the call."""
        message = GenerateTokens(next(self._calls), number, count, sampling=GREEDY)
        return self.call(message, [_u32(tokens)], program)

    async def ends(self, call: int) -> tuple[Answer, Drawn]:
        """Return what a call generated, and its end."""
        await self.until(lambda: self._is_over(call), timeout_s=120)
        told = [message for message, _ in self.answered[call]]
        assert not isinstance(told[-1], CallFailed), told[-1].message
        answer = Answer([token for one in told for token in one.tokens])
        answer.finish_reason = FinishReason(told[-1].finish)
        return answer, told[-1]

    async def write(
        self, tokens: Sequence[int], count: int, program: str = "p"
    ) -> tuple[Answer, int]:
        """Return an answer on a new working set, and how many tokens were not computed for it."""
        number = self.open(program)
        answer, last = await self.ends(self.start_answer(number, tokens, count, program))
        self.call(CloseSet(next(self._calls), number), program=program)
        return answer, last.cached_tokens

    async def feed(self, number: int, tokens: Sequence[int], **wants: Any) -> PassDone:
        """Run tokens on a working set."""
        message = RunPass(next(self._calls), (PassInput(number, **wants),))
        call = self.call(message, [_u32(tokens)])
        await self.until(lambda: call in self.answered, timeout_s=120)
        found = self.answered[call][-1][0]
        assert isinstance(found, PassDone), found
        return found

    async def park(self, number: int) -> SetState:
        call = self.call(ParkSet(next(self._calls), number))
        await self.until(lambda: call in self.answered)
        found = self.answered[call][-1][0]
        assert isinstance(found, SetState), found
        return found

    async def settled(self) -> None:
        """Wait until nothing is on its way down."""
        await self.until(lambda: self.engine.status.store_queue_pages == 0, timeout_s=60)
        await self.until(lambda: self.engine.is_idle, timeout_s=60)

    async def forget(self) -> None:
        """Push out of device memory all that is idle there, with requests."""
        await self.settled()
        total, size = self.table.total, self.subject.page_tokens
        for token in (7, 9):
            await self.asked([token] * (total * size - 1 if total else 10 * size))
            for number in range(self.states.total if self.states is not None else 0):
                # Their pages are those of the one before; each has a snapshot of its own.
                await self.asked([*[token] * (2 * size), 10 + number, 3])
        await self.settled()

    async def asked(self, prompt: list[int]) -> Answer:
        """Have a request answered by one token."""
        answer = self.submit(prompt, 1)
        await self.until(lambda: answer.finish_reason is not None, timeout_s=120)
        return answer

    def collect(self, report: StepReport) -> None:
        super().collect(report)
        for told in report.programs:
            self.answered.setdefault(told.message.call, []).append((told.message, told.frames))

    def _is_over(self, call: int) -> bool:
        last = self.answered.get(call, [(None, ())])[-1][0]
        return isinstance(last, CallFailed) or bool(getattr(last, "finish", ""))


def _u32(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, "<u4").tobytes()

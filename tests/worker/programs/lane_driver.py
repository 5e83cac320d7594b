"""A small model's engine with programs, driven by hand, for tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pie.tokens.tokenizer import Tokenizer
from pie.wire.frames import Buffer
from pie.wire.programs import (
    CallFailed,
    CompactSet,
    Drawn,
    DropSlots,
    ForkSet,
    GenerateTokens,
    OpenSet,
    PassDone,
    PassInput,
    PassPart,
    RunPass,
    SealSet,
    SetState,
)
from pie.worker.assembly import shape_of
from pie.worker.commands import StepReport
from pie.worker.generation import Vocabulary
from pie.worker.model import Model
from pie.worker.programs.commands import ProgramBegan, ProgramCall, ProgramEnded
from pie.worker.programs.lane import ProgramLane
from pie.worker.programs.ledger import PageLedger, StateLedger
from pie.worker.programs.parking import ParkingLot
from pie.worker.programs.roster import Roster
from pie.worker.programs.slots import SlotSet
from pie.worker.runner import Runner
from tests.worker.engine.device import device
from tests.worker.engine.driver import EOS, Driver


@dataclass
class Gave:
    """What one sequence of a pass gave."""

    part: PassPart
    logits: NDArray[np.float32] | None = None
    hidden: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    targets: NDArray[np.float32] | None = None


class LaneDriver(Driver):
    """An engine whose programs' calls are made one by one."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        pages: int = 64,
        share: float = 1.0,
        parking_pages: int = 64,
        slots: int = 16,
        stride_pages: int = 4,
        state_cap: int | None = None,
        **options: Any,
    ) -> None:
        own = device(model, pages, slots=slots, stride_pages=stride_pages)
        arena, size = own.arena, model.layout.page_tokens
        context = min(model.context_tokens, pages * size)
        super().__init__(
            Runner(model, arena),
            tokenizer,
            pages=own.pages,
            page_tokens=size,
            root=model.model_root,
            memory=arena,
            states=own.states,
            context_tokens=context,
            **options,
        )
        self.arena = arena
        self.ledger = PageLedger(self.table, int(own.pages * share))
        self.lot = ParkingLot(
            arena,
            model.layout.attention_parts,
            page_bytes=model.layout.page_bytes,
            budget_bytes=parking_pages * max(model.layout.page_bytes, model.layout.state_bytes),
            state_bytes=model.layout.state_bytes,
        )
        states = None if own.states is None else StateLedger(own.states, state_cap or slots)
        self.roster = Roster(
            self.ledger,
            model.model_root,
            arena,
            shape_of(model, model.context_tokens),
            self.lot,
            page_tokens=size,
            vocabulary=Vocabulary(tokenizer, frozenset({EOS}), model.context_tokens),
            states=states,
        )
        self.engine.run_programs(
            ProgramLane(self.roster, self.ledger, page_tokens=size, max_rows=16)
        )
        self.told: dict[int, list[tuple[Any, Sequence[Buffer]]]] = {}
        self._calls = itertools.count(1)
        self.begin("p")

    def begin(self, program: str, **options: Any) -> None:
        self.put(ProgramBegan(program, **options))

    def end(self, program: str = "p") -> None:
        self.put(ProgramEnded(program))
        self.engine.check()

    def call(self, message: Any, frames: Sequence[Buffer] = (), program: str = "p") -> int:
        self.put(ProgramCall(program, message, [bytes(frame) for frame in frames]))
        return int(message.call)

    def number(self) -> int:
        return next(self._calls)

    def collect(self, report: StepReport) -> None:
        super().collect(report)
        for answer in report.programs:
            self.told.setdefault(answer.message.call, []).append((answer.message, answer.frames))

    def answer(self, call: int) -> tuple[Any, Sequence[Buffer]]:
        self.run()
        return self.told[call][-1]

    def open(self, number: int, program: str = "p") -> None:
        self.call(OpenSet(self.number(), number), program=program)

    def state(self, message: Any, frames: Sequence[Buffer] = ()) -> SetState:
        found, _ = self.answer(self.call(message, frames))
        if isinstance(found, CallFailed):
            raise Failed(found)
        assert isinstance(found, SetState)
        return found

    def held(self, number: int) -> SlotSet:
        return self.roster.programs["p"].sets[number]

    def drop(self, number: int, slots: Sequence[int]) -> SetState:
        return self.state(DropSlots(self.number(), number), [u32(slots)])

    def compact(self, number: int) -> SetState:
        return self.state(CompactSet(self.number(), number))

    def seal(self, number: int) -> SetState:
        return self.state(SealSet(self.number(), number))

    def fork(self, number: int, *forks: int) -> SetState:
        return self.state(ForkSet(self.number(), number, forks))

    def start(
        self,
        number: int,
        tokens: Sequence[int],
        *,
        positions: Sequence[int] | None = None,
        read: Sequence[int] | None = None,
        mask: NDArray[np.bool_] | None = None,
        targets: Sequence[int] = (),
        program: str = "p",
        **wants: Any,
    ) -> int:
        frames = [u32(tokens)]
        shape: tuple[int, int, int, int] | None = None
        if positions is not None:
            frames.append(u32(positions))
        if read is not None:
            frames.append(u32(read))
        if mask is not None:
            full = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            layers, heads, queries, slots = full.shape
            shape = (layers, heads, queries, slots)
            frames.append(np.packbits(full).tobytes())
        if targets:
            frames.append(u32(targets))
        one = PassInput(
            number,
            has_positions=positions is not None,
            has_read=read is not None,
            mask=shape,
            targets=len(targets),
            **wants,
        )
        return self.call(RunPass(self.number(), (one,)), frames, program)

    def feed(self, number: int, tokens: Sequence[int], **options: Any) -> Gave:
        return self.gave(self.start(number, tokens, **options))

    def gave(self, call: int) -> Gave:
        found, frames = self.answer(call)
        if isinstance(found, CallFailed):
            raise Failed(found)
        assert isinstance(found, PassDone)
        (part,) = found.parts
        gave, left = Gave(part), list(frames)
        for name in ("logits", "hidden", "scores"):
            shape = getattr(part, name)
            if shape is not None:
                setattr(gave, name, np.frombuffer(bytes(left.pop(0)), "<f4").reshape(shape))
        if part.targets:
            gave.targets = np.frombuffer(bytes(left.pop(0)), "<f4")
        return gave

    def go_on(self, number: int, tokens: Sequence[int], **options: Any) -> list[Drawn]:
        message = GenerateTokens(self.number(), number, **options)
        self.answer(self.call(message, [u32(tokens)]))
        return [found for found, _ in self.told[message.call]]


class Failed(Exception):  # noqa: N818
    """A call failed."""

    def __init__(self, told: CallFailed) -> None:
        super().__init__(told.message)
        self.told = told


def u32(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, "<u4").tobytes()

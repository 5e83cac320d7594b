"""Calls of programs in any order, among them some that fail while others wait behind them.

Against a plain list of slots for each working set, which a call that fails leaves as it is; and every page
that has a key holds what the key names.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pie.wire.messages import Sampling
from pie.wire.programs import (
    CancelCall,
    CloseSet,
    CompactSet,
    DropSlots,
    ForkSet,
    GenerateTokens,
    OpenSet,
    ParkSet,
    PassInput,
    RunPass,
    SealSet,
)
from tests.worker.programs.toy_lane import POISON, ToyLane, failed, u32

PAGE = 4
TOKENS = st.one_of(
    st.lists(st.sampled_from([3, 4]), min_size=1, max_size=3 * PAGE),
    # Whole pages of few kinds, so that sequences share some.
    st.lists(st.sampled_from([[3] * PAGE, [4] * PAGE]), min_size=1, max_size=3).map(
        lambda pages: [token for page in pages for token in page]
    ),
)


@dataclass
class Line:
    """A working set as its program sees it."""

    slots: dict[int, int] = field(default_factory=dict)
    """The live ones and their tokens."""
    length: int = 0

    def write(self, first: int | None, tokens: list[int]) -> None:
        start = self.length if first is None else first
        self.slots = {slot: token for slot, token in self.slots.items() if slot < start}
        self.slots |= dict(enumerate(tokens, start))
        self.length = start + len(tokens)


class RosterMachine(RuleBasedStateMachine):
    """What a hostile program and a few unlucky ones may do between them."""

    @initialize(cap=st.integers(3, 10))
    def begin(self, cap: int) -> None:
        self.lane = ToyLane(pages=16, page_tokens=PAGE, cap=cap)
        self.lines: dict[int, Line] = {}
        """As of the last answer on each."""
        self.open: list[int] = []
        """Those on which calls are made."""
        self.calls: dict[int, Any] = {}
        self.waiting: dict[int, list[int]] = {}
        """Calls without an answer, and the sets that they are about."""
        self.closing: set[int] = set()
        """Calls that close a set, which there may not be: its fork may have failed."""
        self.unanswered: set[int] = set()
        self.sets = 0
        self.seen = 0
        for _ in range(2):
            self.open_set()

    def make(self, message: Any, sets: list[int], *frames: bytes, data: Any = None) -> None:
        self.calls[message.call] = (message, data)
        self.waiting[message.call] = sets
        self.lane.call(message, *frames)

    @precondition(lambda self: len(self.open) < 5)
    @rule()
    def open_set(self) -> None:
        self.sets += 1
        self.unanswered.add(self.lane.call(OpenSet(self.lane.number(), self.sets)))
        self.lines[self.sets] = Line()
        self.open.append(self.sets)

    @precondition(lambda self: len(self.open) > 1)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.open))
        self.open.remove(number)
        call = self.lane.call(CloseSet(self.lane.number(), number))
        self.closing.add(call)
        self.unanswered.add(call)

    @precondition(lambda self: len(self.open) < 6)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.open))
        self.sets += 1
        self.make(ForkSet(self.lane.number(), number, (self.sets,)), [number, self.sets])
        self.open.append(self.sets)

    @rule(data=st.data(), kind=st.sampled_from([SealSet, CompactSet, ParkSet]))
    def change(self, data: st.DataObject, kind: type) -> None:
        number = data.draw(st.sampled_from(self.open))
        self.make(kind(self.lane.number(), number), [number])

    @rule(data=st.data(), slots=st.lists(st.integers(0, 12), max_size=6, unique=True))
    def drop(self, data: st.DataObject, slots: list[int]) -> None:
        number = data.draw(st.sampled_from(self.open))
        self.make(DropSlots(self.lane.number(), number), [number], u32(slots), data=slots)

    @rule(
        data=st.data(),
        tokens=st.lists(TOKENS, min_size=1, max_size=3),
        write=st.none() | st.none() | st.integers(0, 12),
        poisoned=st.integers(0, 3),
        behind=st.none() | TOKENS,
    )
    def run_pass(
        self,
        data: st.DataObject,
        tokens: list[list[int]],
        write: int | None,
        poisoned: int,
        behind: list[int] | None,
    ) -> None:
        count = min(len(tokens), len(self.open))
        sets = data.draw(st.permutations(self.open))[:count]
        fed = [list(some) for some in tokens[: len(sets)]]
        if poisoned < len(fed):
            fed[poisoned][-1] = POISON
        inputs = tuple(
            PassInput(one, write=write if not at else None) for at, one in enumerate(sets)
        )
        self.make(RunPass(self.lane.number(), inputs), sets, *map(u32, fed), data=fed)
        if behind is not None:
            alone = RunPass(self.lane.number(), (PassInput(sets[-1]),))
            self.make(alone, sets[-1:], u32(behind), data=[behind])

    @rule(data=st.data(), tokens=TOKENS, count=st.integers(1, 9))
    def generate(self, data: st.DataObject, tokens: list[int], count: int) -> None:
        number = data.draw(st.sampled_from(self.open))
        message = GenerateTokens(
            self.lane.number(), number, count, Sampling(temperature=0), ignore_eos=True
        )
        self.make(message, [number], u32(tokens), data=tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        target = data.draw(st.sampled_from(sorted(self.waiting)))
        self.lane.call(CancelCall(self.lane.number(), target))

    @rule(tokens=TOKENS)
    def request(self, tokens: list[int]) -> None:
        self.lane.submit(tokens, 3, ignore_eos=True)

    @rule()
    def the_device_fails(self) -> None:
        self.lane.runner.fails_next = True

    @rule(steps=st.integers(1, 8), pause_s=st.sampled_from([0.0, 6.0]))
    def step(self, steps: int, pause_s: float) -> None:
        for _ in range(steps):
            self.lane.step()
            self.lane.now_s += pause_s
        self.learn()

    def learn(self) -> None:
        for number, told in self.lane.answered[self.seen :]:
            if number in self.unanswered:
                # The engine says that it has carried them out, which goes no further than the host.
                assert failed(told) <= (number in self.closing), "a set can be opened"
                continue
            message, data = self.calls[number]
            sets = self.waiting.pop(number)
            if not failed(told):
                self.apply(message, data, sets, told)
        self.seen = len(self.lane.answered)

    def apply(self, message: Any, data: Any, sets: list[int], told: list[Any]) -> None:
        line = self.lines[sets[0]]
        match message:
            case ForkSet(_, _, forks):
                for fork in forks:
                    self.lines[fork] = deepcopy(line)
            case DropSlots():
                line.slots = {slot: one for slot, one in line.slots.items() if slot not in data}
            case RunPass(_, inputs):
                for one, tokens, part in zip(inputs, data, told[-1].parts, strict=True):
                    self.lines[one.set].write(one.write, tokens)
                    assert part.length == self.lines[one.set].length
                    assert part.first_slot == part.length - len(tokens)
            case GenerateTokens():
                drawn = [token for one in told for token in one.tokens]
                if drawn:
                    line.write(None, [*data, *drawn[:-1]])
                assert told[-1].length == line.length

    @invariant()
    def pages_hold_what_their_keys_name(self) -> None:
        if hasattr(self, "lane"):
            self.lane.check_keys()

    @invariant()
    def sets_hold_what_their_programs_think(self) -> None:
        if not hasattr(self, "lane"):
            return
        self.learn()
        busy = {one for sets in self.waiting.values() for one in sets}
        held = self.lane.roster.programs["p"].sets
        for number in self.open:
            if number in busy or number not in self.lines:
                continue
            one, line = held[number], self.lines[number]
            assert one.live.tolist() == sorted(line.slots)
            assert one.next_slot == line.length
            if not one.pages:
                continue
            for at, slot in enumerate(one.cells.tolist()):
                if slot in line.slots:
                    cell = self.lane.runner.cell(one.pages, at)
                    assert cell is not None
                    assert cell[-1] == line.slots[slot], f"slot {slot} of set {number}"

    def teardown(self) -> None:
        if not hasattr(self, "lane"):
            return
        for _ in range(200):
            self.lane.step()
            self.lane.now_s += 1.0
            if self.lane.engine.is_idle:
                break
        self.sets_hold_what_their_programs_think()
        assert not self.waiting, "every call is answered"
        for number in list(self.open):
            self.lane.call(CloseSet(self.lane.number(), number))
        assert len(self.lane.ledger) == 0
        self.lane.check_keys()


TestRoster = RosterMachine.TestCase
TestRoster.settings = settings(max_examples=100, stateful_step_count=30)

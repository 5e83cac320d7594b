"""What a program expects of a working set's slots, against the set as calls are carried out one by one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pie.inferlet.slot_steps import Slots, SlotStep, SlotSteps


@dataclass
class Call:
    """One call: slots written from `first` on, or one dropped."""

    step: SlotStep
    first: int | None
    tokens: int
    dropped: int | None


def carried_out(before: list[int], length: int, call: Call) -> tuple[list[int], int]:
    if call.dropped is not None:
        return [one for one in before if one != call.dropped], length
    first = length if call.first is None else call.first
    return [one for one in before if one < first] + [
        *range(first, first + call.tokens)
    ], first + call.tokens


class Machine(RuleBasedStateMachine):
    """Calls are made ahead of their answers, which come in order and may be failures."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = SlotSteps(Slots())
        self.calls: list[Call] = []
        self.live: list[int] = []
        self.length = 0

    @rule(tokens=st.integers(1, 4), back=st.integers(0, 3))
    def write(self, tokens: int, back: int) -> None:
        first = max(0, self.steps.ahead.length - back) if back else None

        def change(before: Slots) -> Slots:
            start = before.length if first is None else first
            return before.written(first, start + tokens)

        self.calls.append(Call(self.steps.begin(change), first, tokens, None))

    @rule(slot=st.integers(0, 9))
    def drop(self, slot: int) -> None:
        step = self.steps.begin(
            lambda before: Slots(before.live[before.live != slot], before.length)
        )
        self.calls.append(Call(step, None, 0, slot))

    @precondition(lambda self: self.calls)
    @rule(goes_well=st.booleans(), told=st.booleans())
    def answer(self, goes_well: bool, told: bool) -> None:
        call = self.calls.pop(0)
        # A slot that an earlier failure left unwritten cannot be written after all.
        if not goes_well or (call.first is not None and call.first > self.length):
            self.steps.failed(call.step)
            return
        self.live, self.length = carried_out(self.live, self.length, call)
        found = Slots(np.array(self.live, np.int64), self.length)
        self.steps.done(call.step, (lambda _: found) if told else None)

    @invariant()
    def it_expects_what_comes_when_all_goes_well(self) -> None:
        live, length = self.live, self.length
        for call in self.calls:
            if call.first is not None and call.first > length:
                return
            live, length = carried_out(live, length, call)
        assert self.steps.ahead.live.tolist() == live
        assert self.steps.ahead.length == length


TestSlotSteps = Machine.TestCase

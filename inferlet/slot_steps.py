"""What a program knows of a working set's slots while calls on it are under way.

Covers being ahead of the engine, and being right again when a call fails or gave something else. Does not
cover the calls (`pie.inferlet.working_set`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Slots:
    """The live slots in order, and the next one's number."""

    live: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    length: int = 0

    def written(self, first: int | None, end: int) -> Slots:
        """Return them with slots `first` (by default the next one) up to `end` written, the last ones."""
        first = self.length if first is None else first
        before = self.live if first >= self.length else self.live[self.live < first]
        return Slots(np.concatenate([before, np.arange(first, end)]), end)


Change = Callable[[Slots], Slots]


@dataclass(slots=True, eq=False)
class SlotStep:
    """What one call under way does to the slots."""

    change: Change
    after: Slots


class SlotSteps:
    """Slots as the last answer told them, and as they will be after all calls under way.

    Calls on a working set are answered in the order in which they were made.

    Args:
        known: The slots to begin with.
    """

    def __init__(self, known: Slots) -> None:
        self.ahead = known
        """After all calls under way, if they go well."""
        self._known = known
        self._steps: list[SlotStep] = []

    def begin(self, change: Change) -> SlotStep:
        """Note a call that has been made."""
        self.ahead = change(self.ahead)
        step = SlotStep(change, self.ahead)
        self._steps.append(step)
        return step

    def done(self, step: SlotStep, answer: Callable[[Slots], Slots] | None = None) -> None:
        """Note that a call went well.

        Args:
            step: The call's.
            answer: From the slots before it to those that it left; None leaves what was expected.
        """
        if step not in self._steps:
            return
        before, expected = self._known, step.after
        self._known = (answer or step.change)(before)
        self._steps.remove(step)
        if self._known.length != expected.length or len(self._known.live) != len(expected.live):
            self._look_ahead()

    def failed(self, step: SlotStep) -> None:
        """Note that a call changed nothing."""
        if step in self._steps:
            self._steps.remove(step)
            self._look_ahead()

    def close(self) -> None:
        """Have no slots any more, whatever is still answered."""
        self._steps, self._known = [], Slots()
        self.ahead = self._known

    def _look_ahead(self) -> None:
        self.ahead = self._known
        for step in self._steps:
            step.after = self.ahead = step.change(self.ahead)

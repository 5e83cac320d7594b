"""What one rendering of a chat template may take, and the count of what it has taken.

Covers steps, processor time, the size of one value and the memory of all of them. Does not cover
which operations ask (`pie.tokens.sandbox`, `pie.tokens.filters`, `pie.tokens.methods`).

A thread cannot be stopped from outside, so every operation asks before it works: one that would
make or read too much is refused unstarted, and between two of them the clock is looked at. A time
limit holds as exactly as the longest operation within the size limit, about a tenth of a second.

Memory is counted as a garbage collector would: each new value is noted, and when the notes come
to a threshold, values that nothing but their note refers to are let go. What is left is what the
template holds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

from pie.tokens.errors import TemplateLimitError

T = TypeVar("T")

_MIB = 1024 * 1024
_TICKS_PER_LOOK = 32
"""Operations between two looks at the clock, each of which takes 0.3 us."""
_NOTE_BYTES = 100
"""A value's note: an entry of a dictionary and an integer."""
_SMALL_BYTES = 32
_FIRST_SWEEP_BYTES = 8 * _MIB
_MAX_BITS = 16_384
"""Size of an integer; Python writes none of more than 4,300 digits, which is a little less."""
_sizeof = sys.getsizeof
_ALONE = {0: [0]}
_REFERENCES = sys.getrefcount(_ALONE[0])
"""Of a value that its note alone refers to; releases of Python differ."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """What one rendering may take."""

    steps: int = 1_000_000
    """Turns of loops, calls of macros and items of filters; a million take about a second."""
    output_chars: int = 16 * _MIB
    """Length of the text, and of any string or list on the way to it."""
    held_bytes: int = 128 * _MIB
    """Memory of all strings and lists that it holds at the same time."""
    cpu_s: float = 1.5
    """Processor time, which a busy machine does not lengthen."""


class Run:
    """One rendering."""

    def __init__(self, limits: TemplateLimits) -> None:
        """Start the clock."""
        self.limits = limits
        self._steps = 0
        self._ticks = 0
        self._ends_s = time.thread_time() + limits.cpu_s
        self._notes: dict[int, object] = {}
        self._noted_bytes = 0
        self._sweep_bytes = min(_FIRST_SWEEP_BYTES, limits.held_bytes)

    def step(self) -> bool:
        """Count a turn of a loop or the like; true, so that a test can begin with it."""
        self._steps += 1
        if self._steps > self.limits.steps:
            raise TemplateLimitError(
                f"The chat template took more than {self.limits.steps} steps; it may never end."
            )
        self.tick()
        return True

    def tick(self, operations: int = 1) -> None:
        """Count operations, and look at the clock now and then."""
        self._ticks += operations
        if self._ticks >= _TICKS_PER_LOOK:
            self._ticks = 0
            if time.thread_time() > self._ends_s:
                raise TemplateLimitError(
                    f"The chat template took more than {self.limits.cpu_s:g} seconds; "
                    "it may never end."
                )

    def check_size(self, chars: int) -> None:
        """Refuse a text, or what else takes as much, of this length."""
        limit = self.limits.output_chars
        if chars > limit:
            raise TemplateLimitError(
                f"The chat template made a text or list of more than {limit} characters."
            )
        # Long ones take time: 4 KiB count as one operation.
        self.tick(1 + chars // 4096)

    def check_work(self, comparisons: int) -> None:
        """Refuse an operation that compares characters this many times."""
        if comparisons > 16 * self.limits.output_chars:
            raise TemplateLimitError(
                "The chat template searches a text in a way that takes too long."
            )
        self.tick(1 + comparisons // 4096)

    def joined(self, left: str, right: str) -> str:
        """Return `left + right` as `check_size` and `note` would have it: templates do little else."""
        chars = len(left) + len(right)
        if chars > self.limits.output_chars:
            self.check_size(chars)
        self._ticks += 1 + (chars >> 12)
        if self._ticks >= _TICKS_PER_LOOK:
            self.tick(0)
        text = left + right
        notes, key = self._notes, id(text)
        if key not in notes:
            notes[key] = text
            self._noted_bytes += _sizeof(text) + _NOTE_BYTES
            if self._noted_bytes > self._sweep_bytes:
                self._sweep()
        return text

    def note(self, value: T) -> T:
        """Return a value just made, its memory counted."""
        if value is None or value is True or value is False:
            return value
        if isinstance(value, int):
            check_bits(value.bit_length())
        size = sys.getsizeof(value)
        key = id(value)
        # A noted value is alive, so that an equal `id` is the same value.
        if size > _SMALL_BYTES and key not in self._notes:
            self._notes[key] = value
            self._noted_bytes += size + _NOTE_BYTES
            if self._noted_bytes > self._sweep_bytes:
                # The caller's own reference keeps it through the sweep.
                self._sweep()
        return value

    def each(self, values: Iterable[T]) -> Iterator[T]:
        """Pass on what a filter makes one by one, each a step."""
        for value in values:
            self.step()
            yield self.note(value)

    def _sweep(self) -> None:
        """Forget values that the template no longer holds."""
        notes = self._notes
        left = -1
        while left != len(notes):
            left = len(notes)
            self.tick(1 + left // 8)
            # The newest first: lists go before what they hold.
            for key in reversed(list(notes)):
                if sys.getrefcount(notes[key]) <= _REFERENCES:
                    del notes[key]
        self._noted_bytes = sum(sys.getsizeof(value) + _NOTE_BYTES for value in notes.values())
        limit = self.limits.held_bytes
        if self._noted_bytes > limit:
            raise TemplateLimitError(
                f"The chat template holds more than {limit} bytes of text and lists."
            )
        self._sweep_bytes = min(limit, max(_FIRST_SWEEP_BYTES, 2 * self._noted_bytes))


_run: ContextVar[Run] = ContextVar("pie_template_run")

current: Callable[[], Run] = _run.get
"""Returns the rendering that this thread or task is in."""


@contextmanager
def limited(limits: TemplateLimits) -> Iterator[Run]:
    """Count what is rendered within, by this thread or task, against `limits`."""
    run = Run(limits)
    token = _run.set(run)
    try:
        yield run
    finally:
        _run.reset(token)


def check_bits(bits: int) -> None:
    """Refuse an integer of this size.

    Raises:
        TemplateLimitError: It is larger than a rendering may work with.
    """
    if bits > _MAX_BITS:
        raise TemplateLimitError(f"The chat template made a number of more than {_MAX_BITS} bits.")

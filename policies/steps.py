"""Long work in small steps, so that whoever runs it may do something else in between.

Covers running it, and what comes of it. Does not cover what is done in between (`pie.router.pauses`). The work is a
generator that yields wherever it may be interrupted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Steps(Generic[T]):
    """The steps of some work, to be iterated over once; `result` is there once they are over."""

    result: T

    def __init__(self, work: Generator[None, None, T]) -> None:
        self._work = work

    def __iter__(self) -> Iterator[None]:
        """Do a step at a time."""
        self.result = yield from self._work


def at_once(work: Generator[None, None, T]) -> T:
    """Run work to its end, with nothing in between, and return what it returns."""
    steps = Steps(work)
    for _ in steps:
        pass
    return steps.result

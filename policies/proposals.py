"""What a user's policy proposes, taken some at a time.

Covers beginning, going on and breaking off. Does not cover by when it must have answered
(`pie.policies.aside`, `pie.simulator.watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from pie.page.events import Part
from pie.page.key import PageKey

Proposal = tuple[PageKey, Part]

_T = TypeVar("_T")

_FIRST = 64
"""So many are taken at first: most questions are about fewer pages, and 256 of a policy that scores each take
the whole of a step's millisecond on a busy machine."""
_MOST = 8_192


def sizes() -> Iterator[int]:
    """Yield how many proposals are taken at each time."""
    most = _FIRST
    while True:
        yield most
        most = min(2 * most, _MOST)


class Proposals(Generic[_T]):
    """One answer of a policy. Its methods run the policy's code.

    Args:
        ask: Asks the policy.
    """

    def __init__(self, ask: Callable[[], Iterable[_T]]) -> None:
        self._ask = ask
        self._found: Iterator[_T] | None = None
        self.are_over = False
        """Whether there are no more."""

    def take(self, most: int) -> list[_T]:
        """Return the next proposals, fewer than `most` where there are no more; none once closed."""
        if self.are_over:
            return []
        if self._found is None:
            self._found = iter(self._ask())
        taken = list(islice(self._found, most))
        self.are_over = len(taken) < most
        return taken

    def close(self) -> None:
        """Take no more: a generator ends where it stands."""
        close = getattr(self._found, "close", None)
        self.are_over = True
        self._found = None
        if close is not None:
            close()

"""What routers keep for each other: values by name, for a while.

Covers the contract, and an implementation in one process; `pie.index.shelf_conformance` is the suite that both
pass. Does not cover Redis (`pie.index.shelf_redis`) or what is kept (`pie.router.responding`,
`pie.router.explain`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

ENTRY_BYTES = 300
"""What an entry takes besides its name and value, here as in Redis, measured and rounded up."""


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """How much a shelf keeps; beyond it the first in order are forgotten."""

    most: int
    """Values; 0 keeps none."""
    budget_bytes: int
    ttl_s: float
    """How long after it was put, or used where that counts, a value is kept."""
    by_use: bool = False
    """Whether the order is that of last use, not of being put."""


@dataclass(frozen=True, slots=True)
class Latest:
    """What lies on a shelf."""

    names: list[str]
    """The latest, the newest first."""
    count: int
    used_bytes: int


class Shelf(Protocol):
    """Values by name."""

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Keep values, in the place of others of their names. What is too large alone is not kept.

        Raises:
            IndexNotAskedError: None of them is kept, or only some of many.
            PageIndexError: They are not kept, or nobody knows.
        """
        ...

    def takes(self, name: str, value: bytes) -> bool:
        """Return whether a value is small enough to be kept."""
        ...

    async def get(self, name: str) -> bytes | None:
        """Return a value; None where there is none, or no longer.

        Raises:
            PageIndexError: Nobody knows.
        """
        ...

    async def latest(self, most: int) -> Latest:
        """Return what was put, or used, last.

        Raises:
            PageIndexError: Nobody knows.
        """
        ...


class MemoryShelf:
    """A shelf in this process.

    Args:
        limits: How much it keeps.
        clock: Tells the time in seconds.
    """

    def __init__(self, limits: ShelfLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Do as `Shelf.put` says."""
        for name, value in values:
            self.put_now(name, value)

    def takes(self, name: str, value: bytes) -> bool:
        """Do as `Shelf.takes` says."""
        limits = self._limits
        return bool(limits.most) and entry_bytes(name, value) <= limits.budget_bytes

    async def get(self, name: str) -> bytes | None:
        """Do as `Shelf.get` says."""
        return self.get_now(name)

    async def latest(self, most: int) -> Latest:
        """Do as `Shelf.latest` says."""
        self._trim()
        return Latest(list(islice(reversed(self._kept), most)), len(self), self.used_bytes)

    def put_now(self, name: str, value: bytes) -> None:
        """Keep a value, at once."""
        self._drop(name)
        if not self.takes(name, value):
            return
        self._kept[name] = (self._clock(), value)
        self.used_bytes += entry_bytes(name, value)
        self._trim()

    def get_now(self, name: str) -> bytes | None:
        """Return a value, at once."""
        self._trim()
        if name not in self._kept:
            return None
        value = self._kept[name][1]
        if self._limits.by_use:
            self._kept[name] = (self._clock(), value)
            self._kept.move_to_end(name)
        return value

    def drop_now(self, name: str) -> bool:
        """Forget a value, at once; say whether there was one."""
        was_there = self.get_now(name) is not None
        self._drop(name)
        return was_there

    def check(self) -> None:
        """Assert that it agrees with itself; for tests."""
        sizes = [entry_bytes(name, value) for name, (_, value) in self._kept.items()]
        assert self.used_bytes == sum(sizes)
        assert self.used_bytes <= self._limits.budget_bytes
        assert len(sizes) <= self._limits.most

    def _trim(self) -> None:
        limits, since_s = self._limits, self._clock() - self._limits.ttl_s
        while self._kept:
            name, (at_s, _) = next(iter(self._kept.items()))
            if not (
                at_s <= since_s
                or len(self._kept) > limits.most
                or self.used_bytes > limits.budget_bytes
            ):
                return
            self._drop(name)

    def _drop(self, name: str) -> None:
        if name in self._kept:
            self.used_bytes -= entry_bytes(name, self._kept.pop(name)[1])


def entry_bytes(name: str, value: bytes) -> int:
    """Return what counts of an entry."""
    return ENTRY_BYTES + len(name) + len(value)

"""Numbers for what many rows have in common.

Covers counting how many rows name a value, so that it goes with the last. Does not cover the rows
(`pie.pool.rest_rows`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Value = TypeVar("Value", bound=Hashable)


class Numbered(Generic[Value]):
    """Values, each with a number and a count. Not thread-safe."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        self._values: dict[int, Value] = {}
        self._counts: dict[int, int] = {}
        self._free: list[int] = []

    def __getitem__(self, number: int) -> Value:
        return self._values[number]

    def __iter__(self) -> Iterator[tuple[int, Value]]:
        return iter(self._values.items())

    def take(self, value: Value, count: int = 1) -> int:
        """Return a value's number, which so many more rows name."""
        number = self._numbers.get(value)
        if number is None:
            number = self._free.pop() if self._free else len(self._values)
            self._numbers[value] = number
            self._values[number] = value
            self._counts[number] = 0
        self._counts[number] += count
        return number

    def take_all(
        self, values: Sequence[Value], which: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.int32]:
        """Return numbers for rows, each of which names the value at a place in `values`."""
        counts = np.bincount(which, minlength=len(values)).tolist()
        pairs = zip(values, counts, strict=True)
        numbers = [self.take(value, count) if count else -1 for value, count in pairs]
        return np.array(numbers, np.int32)[which]

    def give(self, number: int) -> None:
        """Say that a row names a value no more."""
        self._counts[number] -= 1
        if not self._counts[number]:
            del self._counts[number], self._numbers[self._values.pop(number)]
            self._free.append(number)

    def check(self, rows: int) -> None:
        """Assert that counts are right: `rows` name one value each."""
        assert sum(self._counts.values()) == rows
        assert all(self._numbers[value] == number for number, value in self._values.items())
        assert all(count > 0 for count in self._counts.values())

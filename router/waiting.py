"""Limits on waiting that cost nothing where nothing is waited for.

Covers just that. `asyncio.timeout` sets a timer of the loop for each use and takes it back, which costs more than
most of what a request awaits: a body that is there, a client whose buffer has room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """Return what comes of `work`, which begins at once.

    Raises:
        TimeoutError: It had to wait, and was not over `limit_s` later; it has been cancelled.
    """
    begun = Begun(work)
    if begun.is_over:
        return begun.result
    async with asyncio.timeout(limit_s):
        return await begun


class Begun(Generic[T]):
    """Some work that has begun: it is over, or waits for the first time and is to be awaited.

    Args:
        work: The work; what it raises before it waits is raised here.
    """

    def __init__(self, work: Awaitable[T]) -> None:
        self._steps = work.__await__()
        self._awaited: object = None
        self._result: T | None = None
        self.is_over = False
        """Whether there is a result."""
        try:
            self._awaited = next(self._steps)
        except StopIteration as end:
            self.is_over, self._result = True, end.value

    @property
    def result(self) -> T:
        """What came of it, where it is over."""
        return cast(T, self._result)

    def __await__(self) -> Generator[Any, Any, T]:
        """Go on with what waits."""
        try:
            yield self._awaited
        except GeneratorExit:
            self._steps.close()
            raise
        except BaseException as error:  # noqa: BLE001 - cancelling is one of those that are passed on
            try:
                self._awaited = self._steps.throw(error)
            except StopIteration as end:
                result: T = end.value
                return result
            # It waits again, to clean up.
            return (yield from self.__await__())
        return (yield from self._steps)

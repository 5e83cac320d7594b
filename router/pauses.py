"""Long work on an event loop, with turns for others in between.

Covers letting them have their turn. Does not cover the work, which yields wherever it may be interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from pie.policies.steps import Steps

_AT_ONCE_S = 0.002
"""How long the event loop is kept at a time, and as much longer as the work takes from one yield to the next."""

T = TypeVar("T")


async def in_turns(
    work: Generator[None, None, T], *, clock: Callable[[], float] = time.monotonic
) -> T:
    """Run work to its end, and return what it returns."""
    steps = Steps(work)
    since_s = clock()
    for _ in steps:
        if clock() - since_s > _AT_ONCE_S:
            await asyncio.sleep(0)
            since_s = clock()
    return steps.result

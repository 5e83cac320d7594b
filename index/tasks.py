"""Ending background tasks."""

from __future__ import annotations

import asyncio

_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 0.5


async def end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it has ended.

    One `cancel` is not enough: in Python 3.11 a cancellation that comes together with what
    `asyncio.wait_for` waits for is lost, and Redis's client waits with it. The waits grow, so that
    they do not keep step with a loop in the task.
    """
    wait_s = _FIRST_WAIT_S
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=wait_s)
        wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)

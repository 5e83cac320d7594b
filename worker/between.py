"""Something short done on the step thread, between two steps, for somebody on the event loop.

Covers asking for it and waiting. Does not cover what is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from pie.worker.commands import Between
from pie.worker.engine_thread import EngineThread

_STEP_S = 30.0
"""Longest wait for the step under way."""

T = TypeVar("T")


async def between(thread: EngineThread, work: Callable[[], T]) -> T:
    """Do `work` on the step thread and return what it returns.

    Raises:
        TimeoutError: The step under way did not end in time; `work` may be done all the same, later.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    thread.put(Between(run))
    async with asyncio.timeout(_STEP_S):
        return await done

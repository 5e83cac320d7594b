"""What one program has its host do beside the engine: requests by HTTP, calls of tools.

Covers how many are under way and wait, answering them, and giving them up with their program. Does not cover
doing them (`pie.worker.programs.web`). For one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from pie.wire.frames import Buffer
from pie.wire.programs import Trouble
from pie.worker.programs.trouble import CallError

log = logging.getLogger("pie.worker.programs.errands")

_MOST_WAITING = 16
"""Those of one program that wait until others are done; each may bring a body."""

Errand = Callable[[], Awaitable[tuple[msgspec.Struct, Sequence[Buffer]]]]


class Errands:
    """One program's errands.

    Args:
        send: Tells the program.
        at_once: Most that are under way.
        on_end: Called with the call of each that is answered or given up.
    """

    def __init__(
        self,
        send: Callable[[msgspec.Struct, Sequence[Buffer]], None],
        at_once: int,
        on_end: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._send = send
        self._on_end = on_end
        self._at_once = at_once
        self._turn = asyncio.Semaphore(at_once)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, call: int, errand: Errand) -> None:
        """Begin one, or let it wait for its turn; its answer goes to the program."""
        if len(self._tasks) >= self._at_once + _MOST_WAITING:
            many = (
                f"{len(self._tasks)} requests and tools are under way or wait: await some of them"
            )
            self._send(CallError(Trouble.BAD_CALL, many).answer(call), ())
            self._on_end(call)
            return
        task = asyncio.get_running_loop().create_task(self._do(call, errand))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._on_end(call))

    async def close(self) -> None:
        """Give up all of them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _do(self, call: int, errand: Errand) -> None:
        try:
            async with self._turn:
                answer, frames = await errand()
        except CallError as error:
            self._send(error.answer(call), ())
        except Exception as error:
            log.exception("what a program asked of its host failed")
            why = f"{type(error).__name__}: {error}"
            self._send(CallError(Trouble.FAILED, why).answer(call), ())
        else:
            self._send(answer, frames)

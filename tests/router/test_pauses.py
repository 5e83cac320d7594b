"""Long work lets others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Generator

from pie.router.pauses import in_turns


async def test_others_have_a_turn_whenever_the_loop_was_kept_for_long() -> None:
    now_s, turns = 0.0, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def work(step_s: float) -> Generator[None, None, int]:
        nonlocal now_s
        for _ in range(10):
            now_s += step_s
            yield
        return 7

    task = asyncio.create_task(other())
    assert await in_turns(work(0.003), clock=lambda: now_s) == 7
    assert turns == 10
    assert await in_turns(work(0.0001), clock=lambda: now_s) == 7
    assert turns == 10, "what is short is not interrupted"
    task.cancel()

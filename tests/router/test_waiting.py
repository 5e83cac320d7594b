"""A limit on waiting."""

from __future__ import annotations

import asyncio

import pytest

from pie.router.waiting import within


class Work:
    """Something to wait for, that notes how it ends."""

    def __init__(self) -> None:
        self.goes_on = asyncio.Event()
        self.ends: list[str] = []

    async def run(self, waits: int = 1) -> str:
        """Wait some times; clean up in the loop's next turn."""
        try:
            for _ in range(waits):
                await self.goes_on.wait()
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            await asyncio.sleep(0)
            self.ends.append("cleaned up")
            raise
        return "done"


async def test_what_waits_for_nothing_is_over_whatever_the_limit() -> None:
    assert await within(0, Work().run(waits=0)) == "done"


async def test_what_waits_is_given_its_time() -> None:
    work = Work()
    asyncio.get_running_loop().call_later(0.01, work.goes_on.set)
    assert await within(60, work.run(waits=3)) == "done"


async def test_what_waits_for_too_long_is_cancelled_and_cleans_up() -> None:
    work = Work()
    with pytest.raises(TimeoutError):
        await within(0.01, work.run())
    assert work.ends == ["cancelled", "cleaned up"]


async def test_whoever_waits_is_cancelled_together_with_the_work() -> None:
    work = Work()
    task = asyncio.create_task(within(60, work.run()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ends == ["cancelled", "cleaned up"]


async def test_work_that_takes_being_cancelled_for_an_answer_may_give_one() -> None:
    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return "cancelled"
        return "never"

    task = asyncio.create_task(within(60, stubborn()))
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "cancelled"


@pytest.mark.parametrize("waits", [0, 1])
async def test_what_the_work_raises_is_raised(waits: int) -> None:
    async def fails() -> None:
        for _ in range(waits):
            await asyncio.sleep(0)
        raise ValueError("as the test wants")

    with pytest.raises(ValueError, match="as the test wants"):
        await within(60, fails())


async def test_a_coroutine_that_is_closed_amid_the_work_closes_it() -> None:
    closed: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            closed.append("closed")

    waiting = within(60, work())
    waiting.send(None)
    waiting.close()
    assert closed == ["closed"]

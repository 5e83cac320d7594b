"""Transfers wait their turn for bytes, and give them back whatever happens."""

import asyncio

from pie.pool.byte_budget import ByteBudget


async def test_transfers_beyond_the_budget_wait_in_order() -> None:
    budget = ByteBudget(10)
    order: list[str] = []
    leave = asyncio.Event()

    async def transfer(name: str, size: int) -> None:
        async with budget.reserve(size):
            order.append(name)
            await leave.wait()

    tasks = [asyncio.create_task(transfer(*each)) for each in (("a", 6), ("b", 6), ("c", 1))]
    await asyncio.sleep(0.01)
    assert order == ["a"], "c is small enough, but b came first"
    leave.set()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c"]
    assert budget.used_bytes == 0


async def test_a_transfer_larger_than_the_budget_goes_alone() -> None:
    budget = ByteBudget(10)
    async with budget.reserve(50):
        assert budget.used_bytes == 10
    assert budget.used_bytes == 0


async def test_a_cancelled_wait_lets_the_next_one_go() -> None:
    budget = ByteBudget(10)

    async def transfer(size: int) -> None:
        async with budget.reserve(size):
            pass

    async with budget.reserve(5):
        large = asyncio.create_task(transfer(10))
        small = asyncio.create_task(transfer(5))
        await asyncio.sleep(0.01)
        large.cancel()
        await asyncio.wait_for(small, 60)
    assert budget.used_bytes == 0


async def test_a_turn_that_comes_with_its_cancellation_is_given_back() -> None:
    budget = ByteBudget(10)

    async def transfer() -> None:
        async with budget.reserve(10):
            pass

    async with budget.reserve(10):
        waiting = asyncio.create_task(transfer())
        await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert budget.used_bytes == 0

"""Several questions at once: in order, so many, and the first error ends them."""

import asyncio

import pytest

from pie.pool.asking import at_once


@pytest.mark.parametrize("limit", [1, 3, 20])
async def test_items_are_taken_in_order_and_so_many_at_once(limit: int) -> None:
    begun: list[int] = []
    under_way = most = 0

    async def work(item: int) -> None:
        nonlocal under_way, most
        begun.append(item)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001 * (item % 3))
        under_way -= 1

    await at_once(work, range(10), limit)
    assert begun == list(range(10))
    assert most == min(limit, 10)


async def test_the_first_error_is_raised_as_it_is_and_ends_the_others() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ConnectionError("gone")
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(item)

    with pytest.raises(ConnectionError, match="gone"):
        await at_once(work, range(10), 3)
    assert begun == [0, 1, 2]
    assert sorted(ended) == [0, 2]


async def test_who_gives_up_leaves_nothing_running() -> None:
    begun = asyncio.Semaphore(0)
    ended: list[int] = []

    async def work(item: int) -> None:
        begun.release()
        try:
            await asyncio.sleep(600)
        finally:
            ended.append(item)

    asking = asyncio.create_task(at_once(work, range(10), 2))
    for _ in range(2):
        await begun.acquire()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert sorted(ended) == [0, 1]


async def test_nothing_to_do_is_done_at_once() -> None:
    async def work(item: int) -> None:
        raise AssertionError(item)

    await at_once(work, (), 0)

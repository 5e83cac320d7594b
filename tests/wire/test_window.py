"""Windows count right and serve waiters in order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings, strategies as st

from pie.wire import PeerGone
from pie.wire.window import CreditWindow, Window
from tests.wire.helpers import WAIT_S


async def test_a_window_is_full_after_so_many_messages() -> None:
    window = Window(2, 100)
    await window.take(1)
    assert window.has_room
    await window.take(1)
    assert not window.has_room


async def test_a_window_is_full_after_so_many_bytes() -> None:
    window = Window(10, 100)
    await window.take(60)
    assert window.has_room_for(40)
    assert not window.has_room_for(41)


async def test_one_message_may_be_larger_than_the_window() -> None:
    window = Window(10, 100)
    await window.take(1000)
    assert not window.has_room
    window.give(1000)
    assert window.has_room


async def test_waiters_get_room_in_order() -> None:
    window = Window(1, 100)
    await window.take(1)
    order: list[int] = []

    async def take(number: int, size_bytes: int) -> None:
        await window.take(size_bytes)
        order.append(number)

    tasks = [asyncio.create_task(take(i, size)) for i, size in enumerate((90, 1, 50))]
    for _ in tasks:
        await asyncio.sleep(0)
        window.check()
        window.give(window.used[1])
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


async def test_a_cancelled_waiter_takes_no_room() -> None:
    window = Window(1, 100)
    await window.take(1)
    first = asyncio.create_task(window.take(1))
    second = asyncio.create_task(window.take(1))
    await asyncio.sleep(0)
    window.give(1)
    # Room has gone to the first, which has not run since.
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await asyncio.wait_for(second, WAIT_S)
    window.give(1)
    assert window.used == (0, 0)


async def test_the_end_reaches_every_waiter() -> None:
    window = Window(1, 100)
    await window.take(1)
    waiter = asyncio.create_task(window.take(1))
    await asyncio.sleep(0)
    window.end(PeerGone("gone"))
    for late in (waiter, window.take(1)):
        with pytest.raises(PeerGone):
            await late


async def test_credit_beyond_what_was_sent_counts_for_nothing() -> None:
    window = CreditWindow(2, 100)
    await window.take(5)
    window.sent(5)
    window.credit(1000)
    window.credit(-3)
    assert window.used == (0, 0)
    window.check()


steps = st.lists(
    st.tuples(st.sampled_from(["take", "credit", "cancel"]), st.integers(1, 120)), max_size=60
)


@settings(max_examples=200)
@given(steps, st.integers(1, 4))
def test_a_window_never_overflows(steps: list[tuple[str, int]], messages: int) -> None:
    async def play() -> None:
        window = CreditWindow(messages, 100)
        waiting: list[asyncio.Task[None]] = []

        async def send(size_bytes: int) -> None:
            await window.take(size_bytes)
            window.sent(size_bytes)

        for step, number in steps:
            if step == "take":
                waiting.append(asyncio.create_task(send(number)))
            elif step == "credit":
                window.credit(number % 3)
            elif waiting:
                waiting[number % len(waiting)].cancel()
            if number % 2:
                await asyncio.sleep(0)
            window.check()
        while window.used != (0, 0) or not all(task.done() for task in waiting):
            window.credit(1)
            await asyncio.sleep(0)
            window.check()

    asyncio.run(asyncio.wait_for(play(), WAIT_S))

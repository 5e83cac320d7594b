from __future__ import annotations

import pytest

from pie.policies.manager import RetentionManager
from pie.worker.page_table import PageTable
from pie.worker.state_table import StateTable
from pie.worker.stores import AGAIN_S, PageToStore, StoreQueue
from tests.worker.engine.test_page_table import TOTAL, frozen, hold, key, make_table


@pytest.fixture
def table() -> PageTable:
    return make_table()


def to_store(pages: list[int], *numbers: int) -> list[PageToStore]:
    return [
        PageToStore(page, frozen(number), key(0))
        for page, number in zip(pages, numbers, strict=True)
    ]


def queue(table: PageTable, limit_pages: int = 10, batch_pages: int = 2) -> StoreQueue:
    return StoreQueue(table, limit_pages=limit_pages, batch_pages=batch_pages)


def test_one_batch_at_a_time_is_pinned(table: PageTable) -> None:
    stores, pages = queue(table), hold(table, 1, 2, 3)
    for one in to_store(pages, 1, 2, 3):
        stores.put(one)
    table.release(pages)
    assert [one.page.key for one in stores.next_batch()] == [key(1), key(2)]
    assert stores.next_batch() == []
    assert (table.counts().in_use, table.counts().idle, len(stores)) == (2, 1, 3)
    stores.ended(2, there=2)
    assert [one.page.key for one in stores.next_batch()] == [key(3)]
    stores.ended(0, there=0)
    assert (stores.stored, stores.dropped, table.counts().idle) == (2, 1, 3)


def test_a_page_that_left_before_its_turn_is_dropped(table: PageTable) -> None:
    stores, pages = queue(table), hold(table, 1)
    stores.put(to_store(pages, 1)[0])
    table.release(pages)
    assert table.allocate(TOTAL, 1) is not None
    assert stores.next_batch() == []
    assert stores.dropped == 1


def test_a_full_queue_drops(table: PageTable) -> None:
    stores, pages = queue(table, limit_pages=1), hold(table, 1, 2)
    for one in to_store(pages, 1, 2):
        stores.put(one)
    assert (len(stores), stores.dropped) == (1, 1)


def test_a_batch_pins_a_quarter_of_the_snapshots_at_most(table: PageTable) -> None:
    states = StateTable(8, state_bytes=1, stride_pages=1, retention=RetentionManager())
    stores = StoreQueue(table, limit_pages=10, batch_pages=10, states=states)
    for number in range(4):
        slot = states.allocate(0)
        assert slot is not None
        held = states.freeze(slot, frozen(number), 0)
        stores.put(PageToStore(held, frozen(number), key(0), is_state=True))
        states.release([held])
    assert [len(stores.next_batch()), len(stores.states_in_flight), stores.in_flight] == [2, 2, ()]
    states.check([stores.states_in_flight])
    stores.ended(2, there=2)
    assert len(stores.next_batch()) == 2
    stores.ended(2, there=2)
    assert (stores.stored, len(stores), states.status().idle) == (4, 0, 4)


def test_a_page_that_the_pool_did_not_take_is_offered_again_ever_later(table: PageTable) -> None:
    now = [100.0]
    stores = StoreQueue(table, limit_pages=10, batch_pages=2, clock=lambda: now[0])
    pages = hold(table, 1, 2)
    for one in to_store(pages, 1, 2):
        stores.put(one)
    table.release(pages)
    _, second = stores.next_batch()
    stores.ended(1, there=1, again=[second])
    assert (stores.stored, stores.dropped, stores.next_batch()) == (1, 0, [])
    assert table.counts().idle == 2, "it is not pinned meanwhile"
    rests = []
    while (rest_s := stores.due_in_s) is not None:
        rests.append(rest_s / AGAIN_S)
        now[0] += rest_s
        batch = stores.next_batch()
        assert [one.page.key for one in batch] == [key(2)]
        stores.ended(0, there=0, again=batch)
    assert rests == [1, 2, 4, 8, 16]
    assert stores.dropped == 1, "not for ever"


def test_pages_that_wait_to_be_offered_again_count_as_queued(table: PageTable) -> None:
    now = [0.0]
    stores = StoreQueue(table, limit_pages=3, batch_pages=2, clock=lambda: now[0])
    pages = hold(table, 1, 2, 3, 4)
    one, two, three, four = to_store(pages, 1, 2, 3, 4)
    for page in (one, two):
        stores.put(page)
    stores.ended(0, there=0, again=stores.next_batch())
    for page in (three, four):
        stores.put(page)
    assert stores.dropped == 1
    now[0] = 2 * AGAIN_S
    assert [page.page.key for page in stores.next_batch()] == [key(3), key(1)]
    stores.ended(2, there=2)
    table.release(pages)

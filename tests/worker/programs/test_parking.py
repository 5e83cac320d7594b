"""Parked sets: their pages leave the device and come back as they were."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from pie.tokens.tokenizer import Tokenizer
from pie.wire.programs import CloseSet, ParkSet, Rows, SealSet, SetState, Trouble
from pie.worker.stores import PageToStore
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.programs.lane_driver import Failed, LaneDriver
from tests.worker.programs.masked_reference import masked
from tests.worker.programs.test_passes import PAGE, causal, same, text

PAGES = 24


def driver_of(tokenizer: Tokenizer, **options: int) -> Iterator[LaneDriver]:  # noqa: F811
    one = LaneDriver(
        tiny_model("llama", page_tokens=PAGE),
        tokenizer,
        **({"pages": PAGES} | options),
    )
    one.open(1)
    yield one
    one.end()
    assert not len(one.ledger)
    assert not one.lot.used_bytes
    one.engine.check()


@pytest.fixture
def driver(tokenizer: Tokenizer) -> Iterator[LaneDriver]:  # noqa: F811
    yield from driver_of(tokenizer)


def park(driver: LaneDriver, number: int) -> SetState:
    return driver.state(ParkSet(driver.number(), number))


def overwrite(driver: LaneDriver) -> None:
    """Write something else to every page that is free or only kept."""
    driver.open(99)
    driver.feed(99, [random.Random(7).randrange(3, VOCAB_SIZE)] * (driver.ledger.room * PAGE))
    driver.call(CloseSet(driver.number(), 99))
    driver.run()


@pytest.mark.parametrize("seed", range(4))
def test_what_a_set_says_does_not_depend_on_being_parked(driver: LaneDriver, seed: int) -> None:
    draw = random.Random(seed)
    ids, allowed = text(96, seed), causal(96)
    done, gone = 0, set[int]()
    got = []
    while done < len(ids):
        count = min(draw.choice([1, 3, 8, 17, 30]), len(ids) - done)
        gave = driver.feed(1, ids[done : done + count], logits=Rows.ALL)
        got.append(gave.logits)
        allowed[done : done + count, sorted(gone)] = False
        done += count
        if seed % 2:
            live = [slot for slot in range(done) if slot not in gone]
            more = draw.sample(live, k=min(len(live) - 1, draw.choice([0, 1, 6])))
            gone.update(more)
            driver.drop(1, more)
        if draw.random() < 0.7:
            assert park(driver, 1).pages == 0
            assert not len(driver.ledger)
            overwrite(driver)
            driver.engine.check()
    want, _ = masked("llama", ids, allowed)
    same(np.concatenate([one for one in got if one is not None]), want)


def test_a_pure_set_comes_back_under_its_keys(driver: LaneDriver) -> None:
    ids = text(40)
    driver.feed(1, ids)
    park(driver, 1)
    overwrite(driver)
    driver.feed(1, [5])
    driver.open(2)
    driver.feed(2, ids)
    assert driver.held(2).cached_tokens == 32
    # All five pages are shared; one more holds what came after them.
    assert len(driver.ledger) == 6


def test_what_comes_back_under_keys_that_nobody_held_is_told_at_once(driver: LaneDriver) -> None:
    told: list[PageToStore] = []
    driver.feed(1, text(4 * PAGE, 1))
    park(driver, 1)
    overwrite(driver)
    assert driver.engine._programs is not None
    driver.engine._programs.roster.on_new_page = told.append
    driver.state(SealSet(driver.number(), 1))
    assert len(told) == 4
    driver.feed(1, text(PAGE, 2))
    assert len({one.page.key for one in told}) == len(told) == 5, "no page is told twice"


def test_a_parked_fork_leaves_the_other_what_they_share(driver: LaneDriver) -> None:
    ids = text(40)
    driver.feed(1, ids)
    driver.fork(1, 2)
    park(driver, 1)
    assert len(driver.ledger) == 5
    one, two = driver.feed(1, [9], logits=Rows.LAST), driver.feed(2, [9], logits=Rows.LAST)
    assert one.logits is not None
    assert two.logits is not None
    assert np.abs(one.logits - two.logits).max() < 1e-5
    # What both share is one page again.
    assert len(driver.ledger) == 7


def test_what_the_host_has_no_room_for_stays(tokenizer: Tokenizer) -> None:  # noqa: F811
    for driver in driver_of(tokenizer, parking_pages=4):
        driver.feed(1, text(40))
        with pytest.raises(Failed) as failed:
            park(driver, 1)
        assert failed.value.told.trouble is Trouble.OUT_OF_PAGES
        assert len(driver.ledger) == 5
        driver.feed(1, [7])


def test_without_room_on_the_device_it_stays_parked_and_can_be_asked_again(
    driver: LaneDriver,
) -> None:
    driver.feed(1, text(40))
    park(driver, 1)
    park(driver, 1)
    driver.open(2)
    driver.feed(2, text((PAGES - 2) * PAGE, 1))
    with pytest.raises(Failed) as failed:
        driver.feed(1, [7])
    assert failed.value.told.trouble is Trouble.OUT_OF_PAGES
    driver.call(CloseSet(driver.number(), 2))
    driver.feed(1, [7])
    assert driver.held(1).next_slot == 41


def test_a_parked_set_can_be_closed(driver: LaneDriver) -> None:
    driver.feed(1, text(40))
    park(driver, 1)
    driver.call(CloseSet(driver.number(), 1))
    driver.run()
    assert not driver.lot.used_bytes

"""A worker says of each page that it had to compute why it was not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pie.page.key import PageKey, page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import LoadDecision, LoadSource, MissedPages, MissReason
from pie.worker.departed import Departed
from pie.worker.page_table import Change, FrozenPage
from pie.worker.sequence import Sequence
from tests.worker.engine.driver import Driver
from tests.worker.engine.test_forks import PAGE as FORK_PAGE, ROOT, World
from tests.worker.engine.toys import ToyRunner

PAGE = 4
KEYS = [PageKey(bytes([number]) * 32) for number in range(200)]

Make = Callable[..., Driver]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def make(pages: int, **options: Any) -> Driver:
        runner = ToyRunner(pages, PAGE)
        return Driver(runner, tokenizer, pages=pages, page_tokens=PAGE, eos=999, **options)

    return make


def change(number: int, *, stored: bool, is_state: bool = False) -> Change:
    return Change(FrozenPage(KEYS[number], b"", number), stored, is_state)


def nowhere(_: PageKey) -> bool:
    return False


def missed(driver: Driver, tokens: range) -> tuple[int, tuple[MissedPages, ...]]:
    started = driver.generate(tokens, 1).started
    assert started is not None
    return started.missed_from, started.missed


def test_a_new_prompt_was_never_computed(make: Make) -> None:
    told = missed(make(32), range(3, 25))
    assert told == (0, (MissedPages(MissReason.NEVER_COMPUTED, 5),))


def test_a_longer_prompt_says_it_of_what_is_new_alone(make: Make) -> None:
    driver = make(32)
    driver.generate(range(3, 19), 1)
    assert missed(driver, range(3, 31)) == (4, (MissedPages(MissReason.NEVER_COMPUTED, 3),))


def test_pages_that_had_to_leave_were_evicted(make: Make) -> None:
    driver = make(8)
    driver.generate(range(3, 19), 1)
    driver.generate(range(100, 128), 1)
    at, runs = missed(driver, range(3, 23))
    assert runs[0].reason is MissReason.EVICTED
    assert at + sum(run.pages for run in runs) == 5
    assert runs[-1] == MissedPages(MissReason.NEVER_COMPUTED, 1)


def test_what_came_back_and_was_computed_anew_is_evicted_no_longer() -> None:
    departed = Departed()
    departed.apply([change(1, stored=True), change(1, stored=False)])
    assert departed.runs(KEYS[1:2], held=nowhere) == (MissedPages(MissReason.EVICTED, 1),)
    departed.apply([change(1, stored=True)])
    assert departed.runs(KEYS[1:2], held=nowhere) == (MissedPages(MissReason.NEVER_COMPUTED, 1),)


def test_a_snapshot_that_leaves_takes_no_page_with_it() -> None:
    departed = Departed()
    departed.apply([change(1, stored=True), change(1, stored=False, is_state=True)])
    assert departed.runs(KEYS[1:2], held=lambda _: True) == (
        MissedPages(MissReason.NO_SNAPSHOT, 1),
    )


def test_the_memory_keeps_the_latest_within_its_bound() -> None:
    departed = Departed(most_keys=3)
    departed.apply([change(number, stored=False) for number in range(5)])
    assert len(departed) == 3
    assert departed.runs(KEYS[:5], held=nowhere) == (
        MissedPages(MissReason.NEVER_COMPUTED, 2),
        MissedPages(MissReason.EVICTED, 3),
    )


def test_many_runs_are_told_short_and_lose_no_page() -> None:
    departed = Departed()
    departed.apply([change(number, stored=False) for number in range(0, 200, 2)])
    told = departed.runs(KEYS, held=nowhere)
    assert len(told) == 64
    assert sum(run.pages for run in told) == 200


def test_pages_of_an_impure_pass_are_opaque() -> None:
    world, departed = World(20), Departed()
    one = world.begin(list(range(2 * FORK_PAGE)))
    assert one.grow(len(one.tokens), 0.0)
    one.advance(2 * FORK_PAGE, 0.0, is_pure=False)
    departed.apply([], world.table.take_opaque())
    keys = page_keys(ROOT, one.tokens, FORK_PAGE)
    assert departed.runs(keys, held=world.table.has) == (MissedPages(MissReason.OPAQUE, 2),)
    assert world.table.take_opaque() == []


def test_a_load_for_which_there_was_no_room_says_so(make: Make) -> None:
    driver = make(32)
    working_set = World(20).begin(list(range(9)))
    one = Sequence(1, working_set, driver.now_s)
    one.missed = (
        MissedPages(MissReason.EVICTED, 3),
        MissedPages(MissReason.NEVER_COMPUTED, 4),
    )
    one.load_wish = LoadDecision((LoadSource("host", 5, 1.0, 2.0, chosen=True),))
    assert one.told_missed == (
        MissedPages(MissReason.NO_ROOM, 5),
        MissedPages(MissReason.NEVER_COMPUTED, 2),
    )
    one.load_decision = one.load_wish
    assert one.told_missed == one.missed

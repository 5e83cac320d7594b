"""Requests that need the same pages at the same time: each page is computed by one of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence as Many

import pytest
from hypothesis import given, settings, strategies as st

from pie.page.key import PageKey
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import Sampling
from pie.worker.sequence import Sequence, SequenceState
from tests.worker.engine.driver import Driver
from tests.worker.engine.toys import ToyRunner, toy_answer
from tests.worker.engine.world import PAGE, World, chunks

PREFIX = list(range(100, 116))


def test_two_that_arrive_together_compute_what_they_share_once() -> None:
    world = World(step_tokens=64)
    first, second = world.submit([*PREFIX, 1]), world.submit([*PREFIX, 2, 3])
    assert [chunks(world.step()) for _ in range(2)] == [{0: 17}, {1: 2}]
    assert (first.cached_device, second.cached_device) == (0, 16)
    assert world.scheduler.shared_in_flight == 16


def test_of_identical_prompts_of_whole_pages_the_others_compute_their_last_token() -> None:
    world = World(step_tokens=64)
    for _ in range(3):
        world.submit(PREFIX)
    assert [chunks(world.step()) for _ in range(2)] == [{0: 16}, {1: 1, 2: 1}]


def test_a_waiter_goes_on_page_by_page_and_where_the_ways_part_by_itself() -> None:
    world = World(step_tokens=8)
    world.submit([*PREFIX, *range(8)])
    world.submit([*PREFIX[:8], *range(20, 26)])
    # The second one's own tokens do not wait for the end of the first one's prompt.
    assert [chunks(world.step()) for _ in range(2)] == [{0: 8}, {0: 8}]
    world.step_tokens = 64
    assert [one.working_set.computed for one in world.sequences] == [16, 8]
    world.run()


def test_those_that_wait_for_a_waiter_share_what_it_makes() -> None:
    world = World(step_tokens=64)
    world.submit(PREFIX[:8])
    for own in (1, 2):
        world.submit([*PREFIX, own])
    assert [chunks(world.step()) for _ in range(3)] == [{0: 8}, {1: 9}, {2: 1}]


def test_a_waiter_leaves_its_share_of_the_step_to_others() -> None:
    world = World(step_tokens=24)
    world.submit([*PREFIX, 1])
    world.submit([*PREFIX, 2])
    world.submit([50, 51, 52])
    assert chunks(world.step()) == {0: 17, 2: 3}


def test_a_waiter_takes_over_where_the_first_was_cancelled() -> None:
    world = World(step_tokens=8)
    first = world.submit([*PREFIX, 1])
    second = world.submit([*PREFIX, 2])
    world.step()
    world.scheduler.finish(first)
    assert chunks(world.step()) == {1: 8}
    assert second.cached_device == 8
    world.run()


def test_a_waiter_takes_over_where_the_first_was_pre_empted() -> None:
    world = World(step_tokens=8)
    first = world.submit([*PREFIX, 1])
    world.submit([*PREFIX, 2])
    world.step()
    world.scheduler._preempt(first)
    world.scheduler._limits = world.scheduler._limits.__class__(1, 100, 8)
    assert chunks(world.step()) == {1: 8}
    world.scheduler._limits = world.scheduler._limits.__class__(4, 100, 8)
    world.run()


def test_a_page_that_an_answer_is_about_to_fill_is_waited_for() -> None:
    world = World(step_tokens=64)
    first = world.submit([1, 2, 3], outputs=4)
    world.step()
    world.submit([*first.working_set.tokens, 9])
    assert [chunks(world.step()) for _ in range(2)] == [{0: 1}, {0: 1, 1: 1}]


def test_what_is_being_loaded_is_waited_for_and_not_loaded_twice() -> None:
    world = World(step_tokens=64, load_wish=lambda one: len(one.working_set.next_keys))
    first, second = world.submit([*PREFIX, 1]), world.submit([*PREFIX, 2])
    plan = world.step()
    assert plan.loads == [first]
    assert not plan.chunks
    world.write(first, range(12))
    world.scheduler.loaded(first, 3, world.now_s)
    assert [chunks(world.step()) for _ in range(2)] == [{0: 5}, {1: 1}]
    assert (first.cached_pool, second.cached_device) == (12, 16)


def test_what_another_did_not_load_is_loaded_after_the_wait() -> None:
    world = World(step_tokens=64, load_wish=lambda one: len(one.working_set.next_keys))
    first, second = world.submit([*PREFIX, 1]), world.submit([*PREFIX, *range(9)])
    assert world.step().loads == [first]
    world.write(first, range(16))
    world.scheduler.loaded(first, 4, world.now_s)
    assert world.step().loads == [second]
    world.write(second, range(16, 24))
    world.scheduler.loaded(second, 2, world.now_s)
    world.run()
    assert (second.cached_device, second.cached_pool) == (16, 8)


def test_a_waiter_loads_what_the_first_one_no_longer_does() -> None:
    world = World(step_tokens=64, load_wish=lambda one: len(one.working_set.next_keys))
    first, second = world.submit([*PREFIX, 1]), world.submit([*PREFIX, 2])
    world.step()
    world.scheduler.finish(first)
    assert world.step().loads == [second]
    for one in (first, second):
        world.scheduler.loaded(one, 0, world.now_s)
    assert chunks(world.step()) == {1: 17}


def test_waiting_tokens_count_what_is_shared_once() -> None:
    world = World(step_tokens=8)
    for own in range(4):
        world.submit([*PREFIX, *range(own * 10, own * 10 + 4)])
    world.plan()
    assert world.scheduler.waiting_tokens == 20 + 3 * 4


class Counting(World):
    """A world that counts how often each full page is computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.computed_pages: Counter[PageKey] = Counter()

    def _run(self, sequence: Sequence, tokens: int) -> None:
        super()._run(sequence, tokens)
        working_set = sequence.working_set
        if working_set.writes:
            start = working_set.computed
            filled = range(start // PAGE, (start + tokens) // PAGE)
            self.computed_pages.update(working_set.keys[index] for index in filled)


prompts_ = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 9), st.integers(0, 3)),
    min_size=2,
    max_size=12,
)
"""Which prefix, how much of it, how many tokens of its own, and steps before the next one."""


@settings(max_examples=200)
@given(
    prompts_,
    st.integers(1, 6),
    st.integers(6, 40),
    st.floats(0, 0.2),
    st.randoms(use_true_random=False),
)
def test_no_page_is_computed_twice(
    asked: Many[tuple[int, int, int, int]],
    max_running: int,
    step_tokens: int,
    cancel_share: float,
    chance: random.Random,
) -> None:
    world = Counting(pages=400, max_running=max_running, step_tokens=step_tokens)
    loads: list[Sequence] = []
    world.load_wish = lambda one: chance.choice([0, len(one.working_set.next_keys)])

    def step() -> None:
        loads.extend(world.step().loads)
        for one in [one for one in loads if chance.random() < 0.4]:
            loads.remove(one)
            came = chance.randint(0, len(one.working_set.pages) - one.working_set.frozen)
            start = one.working_set.frozen * PAGE
            world.write(one, range(start, start + came * PAGE))
            world.scheduler.loaded(one, came, world.now_s)
        alive = [one for one in world.sequences if one.state is not SequenceState.FINISHED]
        if alive and chance.random() < cancel_share:
            world.scheduler.finish(chance.choice(alive))
        world.check()

    for number, (prefix, shared, own, pause) in enumerate(asked):
        world.submit([*[prefix] * shared, *[10 + number] * own])
        for _ in range(pause):
            step()
    for _ in range(1000):
        if world.scheduler.is_empty:
            break
        step()
    assert world.scheduler.is_empty
    assert set(world.computed_pages.values()) <= {1}


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Driver]:
    def make(**options: object) -> Driver:
        runner = ToyRunner(600, PAGE)
        return Driver(runner, tokenizer, pages=600, page_tokens=PAGE, eos=999, **options)  # type: ignore[arg-type]

    return make


def test_sixteen_identical_prompts_cost_one_and_a_token_each(make: Callable[..., Driver]) -> None:
    driver = make(step_tokens=512)
    prompt = [n % 150 for n in range(256)]
    answers = [driver.submit(prompt, 4) for _ in range(16)]
    driver.run()
    assert all(answer.token_ids == toy_answer(prompt, 4) for answer in answers)
    status = driver.engine.status
    assert status.prefill_tokens == 256
    assert status.prefill_tokens_shared_in_flight == 15 * 255
    assert [answer.cached.device for answer in answers] == [0, *[255] * 15]


def test_n_choices_of_one_prompt_draw_each_for_itself(make: Callable[..., Driver]) -> None:
    driver = make(step_tokens=512)
    prompt = [n % 150 for n in range(61)]
    choices = [
        driver.submit(prompt, 12, sampling=Sampling(temperature=1.0, seed=seed))
        for seed in range(4)
    ]
    driver.run()
    assert driver.engine.status.prefill_tokens == 61
    alone = make(step_tokens=512)
    for seed, choice in enumerate(choices):
        again = alone.generate(prompt, 12, sampling=Sampling(temperature=1.0, seed=seed))
        assert choice.token_ids == again.token_ids
    assert len({tuple(choice.token_ids) for choice in choices}) > 1


def test_a_first_one_that_fails_does_not_take_its_waiters_along(
    make: Callable[..., Driver],
) -> None:
    driver = make(step_tokens=512)
    runner = driver.engine._runner
    assert isinstance(runner, ToyRunner)
    prompt = list(range(40))
    first, second = driver.submit(prompt, 3), driver.submit(prompt, 3)
    runner.error = RuntimeError("no memory")
    driver.step()
    runner.error = None
    driver.run()
    assert first.error is not None
    assert second.token_ids == toy_answer(prompt, 3)

"""Choices of one prompt are forks: the prompt is computed once, and each goes on by itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from pie.page.events import Part
from pie.page.key import RootKey
from pie.policies.manager import RetentionManager
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, Sampling
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.page_table import PageTable
from pie.worker.working_set import WorkingSet
from tests.worker.engine.driver import Answer, Driver
from tests.worker.engine.toys import ToyRunner, toy_answer

PAGE = 4
ROOT = RootKey(b"r" * 32)


class World:
    """A page table whose pages hold tokens, and working sets over it."""

    def __init__(self, pages: int) -> None:
        self.table = PageTable(pages, page_bytes=1, part=Part.FULL, retention=RetentionManager())
        self.contents: dict[PageSlot, list[int]] = {page: [] for page in range(pages)}
        self.copies = 0
        self.sets: list[WorkingSet] = []

    def begin(self, tokens: list[int]) -> WorkingSet:
        one = WorkingSet(self.table, ROOT, tokens, page_tokens=PAGE)
        self.sets.append(one)
        return one

    def fork(self, one: WorkingSet) -> WorkingSet | None:
        fork = one.fork(self, 0.0)
        if fork is not None:
            self.sets.append(fork)
        return fork

    def compute(self, one: WorkingSet) -> bool:
        """Run all that is missing, as a pass would."""
        if not one.grow(len(one.tokens), 0.0):
            return False
        if one.writes:
            for slot in range(one.computed, len(one.tokens)):
                page = self.contents[one.pages[slot // PAGE]]
                del page[slot % PAGE :]
                page.append(one.tokens[slot])
        one.advance(one.missing, 0.0)
        return True

    def read(self, one: WorkingSet) -> list[int]:
        """Return the tokens whose state its pages hold."""
        read = [token for page in one.pages for token in self.contents[page]]
        return read[: one.computed]

    def release(self, one: WorkingSet) -> None:
        self.sets.remove(one)
        one.release()

    def copy(self, source_id: PageSlot, target_id: PageSlot) -> None:
        self.copies += 1
        self.contents[target_id] = self.contents[source_id][:]

    def copy_state(self, source_slot: StateSlot, target_slot: StateSlot) -> None:
        raise AssertionError(f"slot {source_slot} was copied to {target_slot}")

    def check(self) -> None:
        self.table.check([one.pages for one in self.sets])
        for one in self.sets:
            assert self.read(one) == one.tokens[: one.computed].tolist()


def test_a_fork_of_whole_pages_copies_none() -> None:
    world = World(20)
    parent = world.begin(list(range(16)))
    world.compute(parent)
    fork = world.fork(parent)
    assert fork is not None
    assert (fork.pages, world.copies) == (parent.pages, 0)
    world.check()


def test_a_fork_copies_the_page_that_is_being_written_and_no_other() -> None:
    world = World(20)
    parent = world.begin(list(range(18)))
    world.compute(parent)
    fork = world.fork(parent)
    assert fork is not None
    assert world.copies == 1
    assert fork.pages[:4] == parent.pages[:4]
    assert fork.pages[4] != parent.pages[4]
    assert fork.missing == parent.missing == 0


def test_a_fork_outlives_its_parent() -> None:
    world = World(20)
    parent = world.begin(list(range(18)))
    world.compute(parent)
    fork = world.fork(parent)
    assert fork is not None
    world.release(parent)
    world.check()
    fork.append(99)
    world.compute(fork)
    world.check()


def test_forks_that_reach_the_same_tokens_meet_in_the_same_page() -> None:
    world = World(20)
    parent = world.begin(list(range(18)))
    world.compute(parent)
    fork = world.fork(parent)
    assert fork is not None
    for one in (parent, fork):
        one.append(7)
        one.append(8)
        world.compute(one)
    assert fork.pages == parent.pages
    world.check()


def test_without_room_for_the_page_that_is_being_written_nothing_is_forked() -> None:
    world = World(5)
    parent = world.begin(list(range(18)))
    world.compute(parent)
    assert world.fork(parent) is None
    world.check()


@given(st.data())
@settings(max_examples=150)
def test_forks_of_forks_never_see_each_others_tokens(data: st.DataObject) -> None:
    world = World(pages=data.draw(st.integers(4, 24)))
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["begin", "fork", "go", "go", "go", "end"]))
        if kind == "begin" or not world.sets:
            tokens = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
            one = world.begin(tokens)
            one.match(0.0)
            if not world.compute(one):
                world.release(one)
        else:
            one = data.draw(st.sampled_from(world.sets))
            if kind == "fork":
                world.fork(one)
            elif kind == "end":
                world.release(one)
            else:
                one.append(data.draw(st.integers(0, 3)))
                if not world.compute(one):
                    world.release(one)
        world.check()


@pytest.fixture
def driver(tokenizer: Tokenizer) -> Driver:
    return make(tokenizer)


def make(tokenizer: Tokenizer, pages: int = 64, **options: Any) -> Driver:
    runner = ToyRunner(pages, PAGE)
    return Driver(
        runner,
        tokenizer,
        pages=pages,
        page_tokens=PAGE,
        memory=runner,
        **({"eos": 999} | options),
    )


def computed(driver: Driver) -> int:
    """Return how many tokens went through the model."""
    runner = driver.engine._runner
    assert isinstance(runner, ToyRunner)
    return sum(batch.tokens for batch in runner.batches)


def choices(driver: Driver, prompt: list[int], count: int, max_tokens: int) -> list[Answer]:
    first = driver.submit(prompt, max_tokens, request_id="a-0")
    return [
        first,
        *(
            driver.submit(prompt, max_tokens, request_id=f"a-{i}", fork_of="a-0")
            for i in range(1, count)
        ),
    ]


def test_a_prompt_of_many_choices_is_computed_once(driver: Driver) -> None:
    prompt = list(range(3, 25))
    answers = choices(driver, prompt, 4, 10)
    driver.run()
    assert [one.token_ids for one in answers] == [toy_answer(prompt, 10)] * 4
    # A token that was drawn last is not run.
    assert computed(driver) == len(prompt) + 4 * 9
    assert driver.engine.status.forks == 3
    assert [one.cached.device for one in answers] == [0, 22, 22, 22]


def test_a_short_prompt_waits_a_moment_for_the_forks_that_are_announced(driver: Driver) -> None:
    first = driver.submit(range(6), 5, request_id="w-0", forks=2)
    assert not driver.step()
    second = driver.submit(range(6), 5, request_id="w-1", fork_of="w-0")
    assert not driver.step()
    third = driver.submit(range(6), 5, request_id="w-2", fork_of="w-0")
    assert driver.step()
    driver.run()
    assert driver.engine.status.forks == 2
    assert first.token_ids == second.token_ids == third.token_ids == toy_answer(range(6), 5)


def test_but_no_longer_than_that(driver: Driver) -> None:
    first = driver.submit(range(6), 5, forks=2)
    driver.now_s += 1.0
    driver.run()
    assert first.token_ids == toy_answer(range(6), 5)


def test_choices_draw_by_themselves_from_the_first_token_on(driver: Driver) -> None:
    prompt = list(range(3, 25))
    answers = []
    for seed in range(6):
        sampling = Sampling(temperature=1.5, seed=seed)
        fork_of = "b-0" if seed else None
        answers.append(
            driver.submit(prompt, 4, request_id=f"b-{seed}", sampling=sampling, fork_of=fork_of)
        )
    driver.run()
    alone = [
        driver.generate(prompt, 4, sampling=Sampling(temperature=1.5, seed=seed)).token_ids
        for seed in range(6)
    ]
    assert [one.token_ids for one in answers] == alone
    assert len({one.token_ids[0] for one in answers}) > 1


def test_forks_end_with_their_own_logprobs(driver: Driver) -> None:
    first, second = (
        driver.submit(range(10), 2, request_id="c-0", sampling=Sampling(temperature=0)),
        driver.submit(
            range(10),
            2,
            request_id="c-1",
            sampling=Sampling(temperature=0, logprobs=3),
            fork_of="c-0",
        ),
    )
    driver.run()
    assert not first.logprobs
    assert [one.chosen.token_id for one in second.logprobs] == second.token_ids


def test_a_fork_whose_parent_is_cancelled_computes_the_prompt_for_the_others(
    tokenizer: Tokenizer,
) -> None:
    driver = make(tokenizer, step_tokens=16)
    prompt = list(range(3, 33))
    first, *forks = choices(driver, prompt, 3, 5)
    driver.step()
    driver.cancel(first)
    driver.run()
    assert [one.token_ids for one in forks] == [toy_answer(prompt, 5)] * 2
    # The pages that the first one had computed were kept.
    assert computed(driver) < len(prompt) + PAGE + 2 * 5


def test_a_fork_that_is_cancelled_while_it_waits_leaves_no_trace(driver: Driver) -> None:
    first, second, third = choices(driver, list(range(3, 25)), 3, 5)
    driver.cancel(second)
    driver.run()
    assert (second.token_ids, second.finish_reason) == ([], None)
    assert first.token_ids == third.token_ids


def test_a_fork_of_a_request_that_is_gone_or_has_begun_goes_its_own_way(driver: Driver) -> None:
    prompt = list(range(3, 25))
    alone = driver.submit(prompt, 3, fork_of="nobody")
    first = driver.submit(prompt, 5, request_id="d-0")
    driver.step()
    driver.step()
    late = driver.submit(prompt, 5, request_id="d-1", fork_of="d-0")
    driver.run()
    assert alone.token_ids == toy_answer(prompt, 3)
    assert late.token_ids == first.token_ids == toy_answer(prompt, 5)
    assert driver.engine.status.forks == 0


def test_a_request_with_other_tokens_or_another_salt_is_no_fork(driver: Driver) -> None:
    prompt = list(range(3, 25))
    driver.submit(prompt, 3, request_id="e-0")
    other = driver.submit([*prompt, 1], 3, request_id="e-1", fork_of="e-0")
    salted = driver.submit(prompt, 3, request_id="e-2", fork_of="e-0", salt="s")
    driver.run()
    assert other.token_ids == toy_answer([*prompt, 1], 3)
    assert salted.token_ids == toy_answer(prompt, 3)
    assert driver.engine.status.forks == 0


def test_forks_beyond_the_running_ones_wait_for_their_turn(tokenizer: Tokenizer) -> None:
    driver = make(tokenizer, max_running=2)
    prompt = list(range(3, 25))
    answers = choices(driver, prompt, 5, 6)
    driver.run()
    assert [one.token_ids for one in answers] == [toy_answer(prompt, 6)] * 5
    assert driver.engine.status.forks == 1


def test_forks_count_against_the_queue(tokenizer: Tokenizer) -> None:
    driver = make(tokenizer, max_running=1, max_waiting=2)
    answers = choices(driver, list(range(3, 25)), 5, 2)
    driver.run()
    assert [one.refused is None for one in answers] == [True, True, True, False, False]
    assert all(len(one.token_ids) == 2 for one in answers[:3])


def test_a_model_that_fails_in_the_parents_step_leaves_the_forks_a_try(driver: Driver) -> None:
    runner = driver.engine._runner
    assert isinstance(runner, ToyRunner)
    runner.error = RuntimeError("boom")
    first, second = choices(driver, list(range(10)), 2, 3)
    driver.step()
    runner.error = None
    driver.run()
    assert first.finish_reason is FinishReason.FAILED
    assert second.token_ids == toy_answer(range(10), 3)


def test_a_page_that_cannot_be_copied_costs_its_fork_and_nobody_else(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = driver.engine._runner
    assert isinstance(runner, ToyRunner)
    copies = iter([RuntimeError("no memory")])
    right = runner.copy

    def copy(source_id: int, target_id: int) -> None:
        for error in copies:
            raise error
        right(source_id, target_id)

    monkeypatch.setattr(runner, "copy", copy)
    prompt = list(range(3, 25))
    first, second, third = choices(driver, prompt, 3, 5)
    driver.run()
    assert second.error == "RuntimeError: no memory"
    assert first.token_ids == third.token_ids == toy_answer(prompt, 5)


def test_a_fork_whose_text_cannot_be_made_ends_alone(driver: Driver) -> None:
    prompt = list(range(3, 25))
    first, second, third = choices(driver, prompt, 3, 5)

    def fail(*_args: object) -> None:
        raise RuntimeError("no text")

    driver.engine._generations[b"router", "a-1"].push = fail  # type: ignore[method-assign, assignment]
    driver.run()
    assert second.error == "RuntimeError: no text"
    assert first.token_ids == third.token_ids == toy_answer(prompt, 5)


def test_forks_that_wait_for_a_place_report_what_they_would_compute(tokenizer: Tokenizer) -> None:
    driver = make(tokenizer, max_running=1)
    choices(driver, list(range(3, 25)), 4, 6)
    driver.step()
    driver.step()
    # The prompt's five full pages are held, so that each lacks two tokens.
    assert driver.engine.load.waiting_tokens == 3 * 2
    driver.run()


@given(
    pages=st.integers(12, 40),
    groups=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 24)), min_size=1, max_size=5),
    cancels=st.lists(st.integers(0, 12), max_size=3),
)
@settings(max_examples=60)
def test_under_pressure_each_choice_is_what_it_would_be_alone(
    tokenizer: Tokenizer,
    pages: int,
    groups: list[tuple[int, int]],
    cancels: list[int],
) -> None:
    driver = make(tokenizer, pages=pages, max_running=4, step_tokens=16)
    wanted: list[tuple[Answer, list[int]]] = []
    for group, (count, length) in enumerate(groups):
        prompt = [group % 2, *range(length)]
        for choice in range(count):
            fork_of = f"g{group}-0" if choice else None
            answer = driver.submit(prompt, 6, request_id=f"g{group}-{choice}", fork_of=fork_of)
            wanted.append((answer, toy_answer(prompt, 6)))
    driver.step()
    cancelled = {id(wanted[at][0]) for at in cancels if at < len(wanted)}
    for answer, _ in wanted:
        if id(answer) in cancelled and answer.finish_reason is None:
            driver.cancel(answer)
    driver.run()
    for answer, tokens in wanted:
        assert answer.token_ids == tokens or id(answer) in cancelled
    assert all(one.refused is None for one, _ in wanted)

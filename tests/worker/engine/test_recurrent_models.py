"""The engine gives what transformers' `generate` gives with recurrent and hybrid models too."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pie.page.events import Part
from pie.page.key import page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.worker.model import Model
from pie.worker.selfcheck import verify
from tests.support.models import RECURRENT, STEPPED, VOCAB_SIZE, tiny_model, tiny_module
from tests.worker.engine.test_models import PAGE, Served, expect, forks_go_different_ways, prompts

KINDS = (*RECURRENT, *STEPPED)


@functools.cache
def served(kind: str) -> Model:
    return verify(tiny_model(kind, page_tokens=PAGE))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def reference(kind: str) -> PreTrainedModel:
    return tiny_module(kind)


@pytest.fixture
def make(kind: str, tokenizer: Tokenizer) -> Callable[..., Served]:
    def make(pages: int = 200, slots: int = 64, **options: Any) -> Served:
        return Served(served(kind), tokenizer, pages, slots=slots, **options)

    return make


def random_tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(count)]


def test_cold_and_warm(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make()
    for prompt in prompts(3):
        cold, warm = driver.generate(prompt, 24), driver.generate(prompt, 24)
        expect(reference, prompt, cold)
        assert warm.token_ids == cold.token_ids
        assert warm.cached.device == (len(prompt) - 1) // PAGE * PAGE


def test_a_second_turn_goes_on_from_the_first_ones_snapshots(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make(stride_pages=2)
    first = random_tokens(30, seed=4)
    answer = driver.generate(first, 30, ignore_eos=True)
    second = [*first, *answer.token_ids, *random_tokens(9, seed=5)]
    again = driver.generate(second, 20)
    assert again.cached.device == 48, "the last stride that was decoded"
    expect(reference, second, again)


def test_forks_that_go_different_ways(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    forks_go_different_ways(reference, make())


def test_a_prompt_in_chunks(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make(step_tokens=21, max_running=4)
    prompt = random_tokens(150, seed=6)
    expect(reference, prompt, driver.generate(prompt, 12))
    longer = [*prompt, *random_tokens(13, seed=7)]
    answer = driver.generate(longer, 12)
    assert answer.cached.device == 144
    expect(reference, longer, answer)


def test_sixteen_at_a_time(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make(step_tokens=100)
    asked = [(prompt, driver.submit(prompt, 20)) for prompt in prompts(16)]
    driver.run()
    for prompt, answer in asked:
        expect(reference, prompt, answer)


def test_few_pages_and_few_slots(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make(pages=26, slots=5, max_running=6)
    asked = [(prompt, driver.submit(prompt, 40)) for prompt in prompts(10, seed=1)]
    driver.run()
    status = driver.engine.status
    assert status.preemptions or not driver.table.total
    assert status.snapshots_skipped
    for prompt, answer in asked:
        expect(reference, prompt, answer)


def test_one_at_a_time_where_there_is_room_for_no_more(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make(pages=14, slots=2)
    asked = [(prompt, driver.submit(prompt, 10)) for prompt in prompts(4, seed=2)]
    driver.run()
    for prompt, answer in asked:
        expect(reference, prompt, answer)


def test_sixteen_identical_prompts_compute_it_once(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make(step_tokens=64)
    prompt = random_tokens(100, seed=8)
    asked = [driver.submit(prompt, 6) for _ in range(16)]
    driver.run()
    for answer in asked:
        expect(reference, prompt, answer)
    assert driver.engine.status.prefill_tokens == 96 + 16 * 4


def test_a_swapped_snapshot_is_noticed(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make()
    first, second = random_tokens(44, seed=3), random_tokens(44, seed=9)
    for prompt in (first, second):
        driver.generate(prompt, 1)
    held = [one.page for one in driver.changes if one.is_state and one.page.index == 4]
    assert driver.states is not None
    slots = [driver.states.use(page.key, 0) for page in held]
    here, there = (driver.arena.export(slot, Part.STATE) for slot in slots)
    driver.arena.load(slots[0], Part.STATE, there)
    driver.arena.load(slots[1], Part.STATE, here)
    driver.states.release(slots)
    answer = driver.generate(first, 12)
    assert answer.cached.device == 40
    with pytest.raises(AssertionError, match="differs"):
        expect(reference, first, answer)


def test_what_is_told_of_snapshots_is_what_there_is(make: Callable[..., Served]) -> None:
    driver = make(stride_pages=3)
    prompt = random_tokens(75, seed=10)
    driver.generate(prompt, 1)
    keys = page_keys(served_root(driver), prompt, PAGE)
    told = [one.page.index for one in driver.changes if one.is_state]
    assert told == [2, 5, 8]
    assert [one.page.key for one in driver.changes if one.is_state] == [keys[at] for at in told]
    pages = [one.page.index for one in driver.changes if not one.is_state]
    assert pages == (list(range(9)) if driver.table.total else [])


def served_root(driver: Served) -> Any:
    return driver.engine._root


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_that_is_not_a_number_is_kept_by_nobody(kind: str, tokenizer: Tokenizer) -> None:
    """Even where only the convolution saw it, which forgets."""
    model = tiny_model(kind, page_tokens=PAGE)
    driver = Served(model, tokenizer, 100, slots=20, step_tokens=512)
    embedding = cast(torch.nn.Embedding, model.module.get_input_embeddings()).weight.data
    right = embedding[99].clone()
    embedding[99] = torch.nan
    prompt = [5, 99, *([6, 7, 8] * 30)]
    answer = driver.generate(prompt, 1)
    assert answer.error == "the model's output is not a number"
    assert not driver.changes
    embedding[99] = right
    expect(tiny_module(kind), prompt, driver.generate(prompt, 8))

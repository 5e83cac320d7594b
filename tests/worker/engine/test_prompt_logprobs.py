"""Log-probabilities of a prompt's tokens are transformers', whatever is cached and whoever yields."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pie.tokens.tokenizer import Tokenizer
from pie.worker.selfcheck import verify
from tests.support.models import VOCAB_SIZE, tiny_model, tiny_module
from tests.worker.engine.driver import Answer
from tests.worker.engine.test_models import PAGE, Served

KINDS = ("llama", "gemma3", "qwen3_next", "mamba2")
TOP = 3


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def reference(kind: str) -> PreTrainedModel:
    return tiny_module(kind)


@pytest.fixture(scope="module")
def make(kind: str, tokenizer: Tokenizer) -> Callable[..., Served]:
    model = verify(tiny_model(kind, page_tokens=PAGE))

    def make(pages: int = 200, slots: int = 64, **options: Any) -> Served:
        return Served(model, tokenizer, pages, slots=slots, **options)

    return make


def random_tokens(count: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, VOCAB_SIZE) for _ in range(count)]


def expect(reference: PreTrainedModel, prompt: list[int], answer: Answer) -> None:
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt])).logits[0].float()
    logprobs = logits.log_softmax(dim=-1)
    told = answer.prompt_logprobs
    assert told is not None
    assert [one.chosen.token_id for one in told] == prompt[1:]
    for at, one in enumerate(told):
        assert one.chosen.logprob == pytest.approx(float(logprobs[at, prompt[at + 1]]), abs=2e-3)
        best = logprobs[at].topk(TOP).values.tolist()
        assert [top.logprob for top in one.top] == pytest.approx(best, abs=2e-3)


def test_they_are_transformers_own_cold_and_warm(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make(step_tokens=24)
    prompt = random_tokens(75, 1)
    plain = driver.generate(prompt, 6)
    for _ in range(2):
        told = driver.generate(prompt, 6, prompt_logprobs=TOP)
        expect(reference, prompt, told)
        # Nothing is taken from pages that are held, and what is made is shared all the same.
        assert told.cached.total == 0
        assert told.token_ids == plain.token_ids
    assert plain.prompt_logprobs is None
    again = driver.generate(prompt, 6)
    assert again.cached.total > 0
    assert again.token_ids == plain.token_ids


def test_its_pages_serve_others_that_come_with_it_and_after_it(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make(step_tokens=24)
    prompt = random_tokens(70, 2)
    before = driver.submit(prompt, 4)
    told = driver.submit(prompt, 4, prompt_logprobs=TOP)
    other = driver.submit(prompt, 4)
    driver.run()
    expect(reference, prompt, told)
    assert told.token_ids == other.token_ids == before.token_ids
    assert driver.generate([*prompt, 5], 1).cached.total > 0


def test_forks_answer_alike_and_only_the_first_is_told(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    driver = make()
    prompt = random_tokens(40, 3)
    told = driver.submit(prompt, 4, request_id="a", forks=1, prompt_logprobs=TOP)
    fork = driver.submit(prompt, 4, request_id="b", fork_of="a")
    driver.run()
    expect(reference, prompt, told)
    assert fork.token_ids == told.token_ids
    assert fork.prompt_logprobs is None


def test_one_that_yields_tells_each_token_once(
    kind: str, reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    if kind == "mamba2":
        pytest.skip("it has no pages to run out of")
    driver = make(pages=72 // PAGE, step_tokens=4, max_running=2)
    first = driver.submit(random_tokens(3, 4), 50, ignore_eos=True)
    driver.step()
    prompt = random_tokens(61, 5)
    told = driver.submit(prompt, 10, ignore_eos=True, prompt_logprobs=TOP)
    while not driver.engine._scheduler.preemptions:
        driver.step()
    assert not told.deltas, "it yields amid its prompt"
    driver.run()
    assert first.finish_reason is not None
    expect(reference, prompt, told)


def test_a_prompt_of_one_token_has_none(make: Callable[..., Served]) -> None:
    assert make().generate([7], 2, prompt_logprobs=TOP).prompt_logprobs in ((), None)

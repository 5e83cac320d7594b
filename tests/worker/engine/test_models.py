"""The engine gives what transformers' `generate` gives, whatever comes from a cache."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pie.policies.manager import RetentionManager
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, Sampling
from pie.worker.arena import Arena
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.model import Model
from pie.worker.runner import Runner
from pie.worker.state_table import StateTable
from tests.support.models import VOCAB_SIZE, tiny_model, tiny_module
from tests.worker.engine.driver import EOS, GREEDY, Answer, Driver

PAGE = 8
KINDS = ("llama", "qwen3", "gemma3", "gpt2")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def reference(kind: str) -> PreTrainedModel:
    return tiny_module(kind)


@pytest.fixture
def make(kind: str, tokenizer: Tokenizer) -> Callable[..., Served]:
    model = tiny_model(kind, page_tokens=PAGE)

    def make(pages: int = 128, **options: Any) -> Served:
        return Served(model, tokenizer, pages, **options)

    return make


class Served(Driver):
    """A driver over a real model."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        pages: int,
        *,
        slots: int = 0,
        stride_pages: int = 4,
        **options: Any,
    ) -> None:
        pages = pages if model.specs else 0
        self.arena = Arena(model.layout, pages, state_slots=slots)
        states = None
        if model.states:
            states = StateTable(
                slots,
                state_bytes=model.layout.state_bytes,
                stride_pages=stride_pages,
                retention=RetentionManager(),
            )
        super().__init__(
            Runner(model, self.arena),
            tokenizer,
            pages=pages,
            page_tokens=PAGE,
            page_bytes=self.arena.page_bytes,
            root=model.model_root,
            context_tokens=min(model.context_tokens, pages * PAGE or 1000),
            memory=self.arena,
            states=states,
            **options,
        )


def expect(
    reference: PreTrainedModel,
    prompt: list[int],
    answer: Answer,
    *,
    ignore_eos: bool = False,
    banned: int | None = None,
) -> None:
    """Compare with `generate`; where the reference's top two are close, go on from ours."""
    given = answer.token_ids
    done = 0
    while done < len(given):
        ids = torch.tensor([prompt + given[:done]])
        out = reference.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=len(given) - done,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            **({"eos_token_id": None} if ignore_eos else {}),
            **({} if banned is None else {"suppress_tokens": [banned]}),
            return_dict_in_generate=True,
        )
        theirs = out.sequences[0, ids.shape[1] :].tolist()
        for at, token in enumerate(theirs):
            if token != given[done + at]:
                top = out.logits[at][0].topk(2).values
                assert top[0] - top[1] < 1e-3, f"token {done + at} differs"
                done += at + 1
                break
        else:
            assert len(theirs) == len(given) - done
            assert (given[-1] == EOS and not ignore_eos) == (
                answer.finish_reason is FinishReason.STOP
            )
            return


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of which some share their beginnings."""
    chance = random.Random(seed)
    shared = [[chance.randrange(3, VOCAB_SIZE) for _ in range(40)] for _ in range(3)]
    return [
        chance.choice(shared)[: chance.randrange(41)]
        + [chance.randrange(3, VOCAB_SIZE) for _ in range(chance.randrange(1, 60))]
        for _ in range(count)
    ]


def test_cold_and_warm(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make()
    for prompt in prompts(3):
        cold, warm = driver.generate(prompt, 24), driver.generate(prompt, 24)
        expect(reference, prompt, cold)
        assert warm.token_ids == cold.token_ids
        assert warm.cached.device == min(len(prompt) // PAGE * PAGE, len(prompt) - 1)


def test_a_fully_cached_prompt(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make()
    prompt = prompts(1)[0] + [5] * 40
    prompt = prompt[: len(prompt) // PAGE * PAGE]
    driver.generate(prompt, 1)
    answer = driver.generate(prompt, 12)
    assert answer.cached.device == len(prompt) - 1
    expect(reference, prompt, answer)


def test_sixteen_at_a_time(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make(step_tokens=100)
    asked = [(prompt, driver.submit(prompt, 20)) for prompt in prompts(16)]
    driver.run()
    for prompt, answer in asked:
        expect(reference, prompt, answer)


def test_forks_that_go_different_ways(
    reference: PreTrainedModel, make: Callable[..., Served]
) -> None:
    forks_go_different_ways(reference, make())


def forks_go_different_ways(reference: PreTrainedModel, driver: Served) -> None:
    """Compare a parent and forks of which one must begin otherwise with `generate`."""
    # One that ends with a page, and one whose last page is copied.
    for length in (40, 43):
        prompt = [7 + at * 11 % 50 for at in range(length)]
        first = driver.generate(prompt, 1).token_ids[0]
        other = Sampling(temperature=0, logit_bias={first: -100.0})
        parent = driver.submit(prompt, 24, request_id=f"{length}-0", salt="new")
        forks = [
            driver.submit(
                prompt,
                24,
                request_id=f"{length}-{at}",
                salt="new",
                fork_of=f"{length}-0",
                sampling=other if at == 1 else GREEDY,
            )
            for at in (1, 2)
        ]
        driver.run()
        expect(reference, prompt, parent)
        expect(reference, prompt, forks[0], banned=first)
        assert forks[1].token_ids == parent.token_ids
    assert driver.engine.status.forks == 4


def test_few_pages(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make(pages=26, max_running=6)
    asked = [(prompt, driver.submit(prompt, 40)) for prompt in prompts(10, seed=1)]
    driver.run()
    assert driver.engine.status.preemptions
    for prompt, answer in asked:
        expect(reference, prompt, answer)


def test_a_swapped_page_is_noticed(reference: PreTrainedModel, make: Callable[..., Served]) -> None:
    driver = make()
    chance = random.Random(3)
    first, second = ([chance.randrange(3, VOCAB_SIZE) for _ in range(44)] for _ in range(2))
    driver.generate(first, 1)
    driver.generate(second, 1)
    held = [change.page for change in driver.changes]
    pages = [driver.table._by_key[page.key] for page in held if page.index == 3]
    for part in driver.arena.layout.parts:
        here, there = (driver.arena.export(page, part) for page in pages)
        driver.arena.load(pages[0], part, there)
        driver.arena.load(pages[1], part, here)
    answer = driver.generate(first, 12)
    assert answer.cached.device == 40
    with pytest.raises(AssertionError, match="differs"):
        expect(reference, first, answer)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral"])
def test_a_state_that_is_not_a_number_is_kept_by_nobody(kind: str, tokenizer: Tokenizer) -> None:
    model = tiny_model(kind, page_tokens=PAGE)
    driver = Served(model, tokenizer, 64, step_tokens=512)
    embedding = cast(torch.Tensor, model.module.get_input_embeddings().weight).data
    right = embedding[99].clone()
    embedding[99] = torch.nan
    # Far out of every window's reach from the last token.
    prompt = [5, 99, *([6, 7, 8] * 150)]
    answer = driver.generate(prompt, 1)
    assert answer.error == "the model's output is not a number"
    assert not driver.changes
    embedding[99] = right
    expect(tiny_module(kind), prompt, driver.generate(prompt, 8))


def test_logits_of_cached_prefixes_stay_within_tolerance(
    kind: str, reference: PreTrainedModel
) -> None:
    model = tiny_model(kind, page_tokens=PAGE)
    runner = Runner(model, Arena(model.layout, 16))
    tokens = prompts(1, seed=2)[0][:60]
    pages = list(range(16))
    runner.run(Batch([Pass(0, tokens[:-3], 0, pages)]))
    warm = runner.run(Batch([Pass(0, tokens[-3:], len(tokens) - 3, pages, LogitRows.ALL)]))
    with torch.inference_mode():
        cold = reference(torch.tensor([tokens])).logits[0, -3:]
    assert (warm.of(0) - cold).abs().max() <= 1e-5 * cold.abs().max()

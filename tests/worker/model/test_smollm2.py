"""SmolLM2 over pages is transformers' SmolLM2: the model that comes with Pie, in float32."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from pie.worker.attention.native import native_backend
from pie.worker.batch import Batch
from pie.worker.cpu import multiplies_bfloat16
from pie.worker.fusing import fused_layers
from pie.worker.model import Model
from pie.worker.settings import DEFAULT_CACHE_FOLDER
from tests.support.equality import Sequences, assert_same_logits, assert_same_tokens
from tests.support.models import smollm2

pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("smollm2")]

ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def model() -> Model:
    return smollm2()


@pytest.fixture(scope="module")
def oracle(model: Model) -> PreTrainedModel:
    found: PreTrainedModel = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32)
    found.eval()  # type: ignore[no-untyped-call]
    return found


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Any:
    return AutoTokenizer.from_pretrained(model.folder)


@pytest.fixture(scope="module")
def prompt(tokenizer: Any) -> list[int]:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(ids["input_ids"])


def logits_of(oracle: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = oracle(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def test_it_says_what_it_is(model: Model) -> None:
    assert model.name == "smollm2"
    assert model.context_tokens == 8192
    assert model.layout.page_bytes == 30 * 2 * 16 * 3 * 64 * 4


@pytest.mark.parametrize("chunk", [None, 16, 13])
def test_it_answers_as_transformers_does(
    model: Model, oracle: PreTrainedModel, tokenizer: Any, prompt: list[int], chunk: int | None
) -> None:
    run = Sequences(model, pages=16)
    first = run.feed(1, prompt, chunk=chunk)
    assert_same_logits(first, logits_of(oracle, prompt))
    got = run.generate(1, first, 8)
    made = cast(Any, oracle).generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8)
    assert_same_tokens(got, logits_of(oracle, prompt + got)[len(prompt) - 1 : -1])
    assert got == made[0, len(prompt) :].tolist()
    assert tokenizer.decode(got, skip_special_tokens=True) == ANSWER


def test_a_mixed_batch_with_pages_from_another_arena_is_right(
    model: Model, oracle: PreTrainedModel, prompt: list[int]
) -> None:
    first = Sequences(model, pages=8)
    first.feed(1, prompt[:32])
    run = Sequences(model, pages=40, seed=3)
    run.fill(1, first.payloads(1, 2), prompt[:32])
    texts = {2: prompt[:9], 3: prompt[5:30], 4: prompt[7:8]}
    passes = [run.make(1, prompt[32:]), *(run.make(n, ids) for n, ids in texts.items())]
    output = run.runner.run(Batch(passes))
    assert_same_logits(output.of(0), logits_of(oracle, prompt)[32:])
    for index, ids in enumerate(texts.values(), start=1):
        assert_same_logits(output.of(index), logits_of(oracle, ids))


def test_a_swapped_page_shows(model: Model, oracle: PreTrainedModel, prompt: list[int]) -> None:
    run = Sequences(model, pages=16)
    run.feed(1, prompt[:-1])
    run.swap(1, 0, list(reversed(prompt)))
    with pytest.raises(AssertionError, match="logits are off"):
        assert_same_logits(run.feed(1, prompt[-1:]), logits_of(oracle, prompt)[-1:])


def test_bfloat16_stays_within_its_rounding(oracle: PreTrainedModel, prompt: list[int]) -> None:
    run = Sequences(smollm2(dtype="bfloat16"), pages=16)
    want = logits_of(oracle, prompt)
    got = torch.cat([run.feed(1, prompt[:-3], chunk=20), run.feed(1, prompt[-3:], chunk=1)])
    assert float((got - want).abs().max() / want.abs().max()) <= 0.05


@pytest.mark.skipif(
    not multiplies_bfloat16() or native_backend(DEFAULT_CACHE_FOLDER) is None,
    reason="layers run operation by operation here, as transformers' do",
)
def test_bfloat16_loses_less_than_half_of_what_transformers_loses(
    oracle: PreTrainedModel, prompt: list[int]
) -> None:
    model = smollm2(dtype="bfloat16")
    assert len(fused_layers(model.module)) == model.layers
    theirs = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.bfloat16)
    want = logits_of(oracle, prompt)
    got = Sequences(model, pages=16).feed(1, prompt)
    errors = [
        (one - want).square().mean().sqrt() for one in (got, logits_of(theirs, prompt).float())
    ]
    assert errors[0] < errors[1] / 2
    assert got.argmax(-1).equal(want.argmax(-1))

"""What no program may do to a step, which is everybody's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, Sampling
from pie.wire.programs import ChatTurn, CloseSet, PassInput, Render, RunPass, Trouble
from pie.worker.batch import Batch, StepOutput
from pie.worker.programs.conversation import Conversations
from pie.worker.programs.trouble import CallError
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.programs.lane_driver import Failed, LaneDriver, u32

PAGE = 8


def text(count: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)]


@pytest.mark.parametrize(
    "wild",
    [
        Sampling(temperature=1.0, logit_bias={5: 1e39}),
        Sampling(temperature=1.0, presence_penalty=-1e39),
        Sampling(temperature=1e300),
    ],
)
def test_a_sampler_out_of_bounds_is_refused(tokenizer: Tokenizer, wild: Sampling) -> None:  # noqa: F811
    driver = LaneDriver(tiny_model("llama", page_tokens=PAGE), tokenizer)
    driver.open(1)
    with pytest.raises(Failed) as caught:
        driver.feed(1, text(5), sampling=wild)
    assert caught.value.told.trouble is Trouble.BAD_CALL
    assert driver.feed(1, text(5), sampling=Sampling(temperature=1.0)).part.token is not None


def test_positions_that_are_taken_again_reach_no_further_than_the_context(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    model = tiny_model("llama", page_tokens=PAGE)
    context = model.context_tokens
    driver = LaneDriver(model, tokenizer, pages=2 * context // PAGE + 20, step_tokens=256)
    driver.open(1)
    driver.feed(1, text(context - 3), positions=[0] * (context - 3))
    request = driver.submit(text(20, 5), 8)
    with pytest.raises(Failed) as caught:
        driver.feed(1, text(4), positions=[0] * 4)
    assert caught.value.told.trouble is Trouble.CONTEXT_LENGTH
    assert "drop some and compact" in caught.value.told.message
    drawn = driver.go_on(1, text(1), max_tokens=5, ignore_eos=True)
    assert [len(one.tokens) for one in drawn] == [1, 1]
    assert drawn[-1].finish == "length"
    assert request.finish_reason is FinishReason.LENGTH, request.error


def test_seals_take_room_of_the_context_until_the_slots_are_gathered(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    model = tiny_model("llama", page_tokens=PAGE)
    driver = LaneDriver(model, tokenizer, pages=2 * model.context_tokens // PAGE)
    driver.open(1)
    for _ in range(model.context_tokens // PAGE):
        driver.feed(1, [5])
        driver.seal(1)
    with pytest.raises(Failed) as caught:
        driver.feed(1, [5])
    assert caught.value.told.trouble is Trouble.CONTEXT_LENGTH
    driver.compact(1)
    driver.feed(1, [5])


def test_a_step_that_programs_make_fail_runs_again_for_the_requests(
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = LaneDriver(tiny_model("llama", page_tokens=PAGE), tokenizer)
    driver.open(1)
    want = driver.generate(text(20), 6).token_ids
    runner = driver.engine._runner
    run = runner.run

    def fails(batch: Batch) -> StepOutput:
        if any(one.sequence_id < 0 for one in batch.passes):
            raise RuntimeError("out of memory")
        return run(batch)

    monkeypatch.setattr(runner, "run", fails)
    request = driver.submit(text(20), 6)
    call = driver.start(1, text(9, 1))
    told, _ = driver.answer(call)
    assert "out of memory" in told.message
    assert request.token_ids == want, request.error


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_page_that_a_program_left_without_numbers_spoils_no_request(
    tokenizer: Tokenizer,  # noqa: F811
    kind: str,
) -> None:
    model = tiny_model(kind, page_tokens=PAGE, dtype=torch.bfloat16, attention="torch")
    driver = LaneDriver(model, tokenizer, pages=16)
    driver.open(1)
    large = np.full((60, model.module.config.hidden_size), 3.4e38, np.float32)
    call = driver.call(
        RunPass(driver.number(), (PassInput(1, has_embeddings=True),)),
        [u32([0] * 60), large.tobytes()],
    )
    told, _ = driver.answer(call)
    assert told.trouble is Trouble.FAILED
    assert driver.arena.values[0].isnan().any()
    driver.call(CloseSet(driver.number(), 1))
    answers = [driver.submit(text(count, count), 6) for count in (11, 20, 3)]
    driver.run()
    assert [one.error for one in answers] == [None] * 3


def test_what_no_set_can_hold_is_refused_before_it_is_looked_at(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    driver = LaneDriver(tiny_model("llama", page_tokens=PAGE), tokenizer)
    driver.open(1)
    driver.feed(1, text(9))
    refused: dict[str, Callable[[], object]] = {
        "named twice": lambda: driver.drop(1, [3] * 100_000),
        "slot 9 was never written": lambda: driver.drop(1, list(range(100_000))),
        "model's context": lambda: driver.feed(1, text(100_000)),
        "context is": lambda: driver.feed(1, [5], read=[3] * 100_000),
        "run fewer tokens": lambda: driver.feed(1, [5], mask=np.ones((1, (1 << 24) + 1), np.bool_)),
    }
    for message, attempt in refused.items():
        with pytest.raises(Failed, match=message):
            attempt()
    assert driver.feed(1, text(3)).part.length == 12


def test_a_conversation_longer_than_a_text_may_be_is_refused(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    template = ChatTemplate({"default": source}, {})
    conversations = Conversations(tokenizer, template)
    assert conversations.tokens(Render(1, (ChatTurn("user", "abc"),)))
    with pytest.raises(CallError, match="a conversation of more than 4194304 characters"):
        conversations.tokens(Render(1, (ChatTurn("user", "a" * (3 << 20)),) * 2))

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from pie.page.events import Epoch
from pie.wire.errors import RefusedError
from pie.wire.messages import Generate, RefusalCode, Sampling
from pie.worker.intake import Intake

INTAKE = Intake(vocab_size=100, context_tokens=10)


def frame(*tokens: int) -> list[memoryview]:
    return [memoryview(struct.pack(f"<{len(tokens)}I", *tokens))]


def request(**fields: Any) -> Generate:
    given: dict[str, Any] = {
        "request_id": "r",
        "epoch": Epoch(1),
        "output_start": 3,
        "max_tokens": 5,
    }
    return Generate(**(given | fields))


def refusal(request: Generate, frames: list[memoryview]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        INTAKE.tokens(request, frames)
    return caught.value


def test_takes_a_good_request() -> None:
    assert INTAKE.tokens(request(), frame(1, 2, 3)).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"output_start": 4}, "output_start"),
        ({"output_start": -1}, "output_start"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"request_id": ""}, "request_id"),
        ({"stop": ("a", "")}, "stop string"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
        ({"sampling": Sampling(top_p=0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.5)}, "top_p"),
        ({"sampling": Sampling(top_k=-1)}, "top_k"),
        ({"sampling": Sampling(min_p=2)}, "min_p"),
        ({"sampling": Sampling(frequency_penalty=math.nan)}, "frequency_penalty"),
        ({"sampling": Sampling(presence_penalty=math.inf)}, "presence_penalty"),
        ({"sampling": Sampling(logit_bias={1: math.nan})}, "logit_bias"),
        ({"sampling": Sampling(temperature=1e300)}, "temperature"),
        ({"sampling": Sampling(frequency_penalty=-1e39)}, "frequency_penalty"),
        ({"sampling": Sampling(presence_penalty=2.5)}, "presence_penalty"),
        ({"sampling": Sampling(logit_bias={1: 1e39})}, "logit_bias"),
        ({"sampling": Sampling(repetition_penalty=1e-300)}, "repetition_penalty"),
        ({"sampling": Sampling(repetition_penalty=1e39)}, "repetition_penalty"),
        ({"sampling": Sampling(bad_words=((1,) * 300_000,))}, "bad_words"),
        ({"sampling": Sampling(logprobs=-1)}, "logprobs"),
        ({"sampling": Sampling(logit_bias=dict.fromkeys(range(5000), 1.0))}, "logit_bias"),
        ({"stop": ("a",) * 300}, "stop strings"),
        ({"stop_token_ids": (1,) * 300}, "stop tokens"),
    ],
)
def test_names_what_is_wrong(fields: dict[str, Any], names: str) -> None:
    error = refusal(request(**fields), frame(1, 2, 3))
    assert error.code is RefusalCode.BAD_MESSAGE
    assert names in error.message


def test_names_all_of_the_sampling_that_is_wrong() -> None:
    error = refusal(request(sampling=Sampling(top_p=0, top_k=-1)), frame(1, 2, 3))
    assert "top_p" in error.message
    assert "top_k" in error.message


@pytest.mark.parametrize("frames", [[], [memoryview(b"abc")], [*frame(1), *frame(2)], frame()])
def test_refuses_frames_that_are_no_tokens(frames: list[memoryview]) -> None:
    assert refusal(request(output_start=0), frames).code is RefusalCode.BAD_MESSAGE


def test_refuses_tokens_that_the_model_lacks() -> None:
    assert "100" in refusal(request(), frame(1, 2, 100)).message


def test_a_prompt_must_leave_room_for_a_token() -> None:
    assert len(INTAKE.tokens(request(), frame(*range(9)))) == 9
    for length in (10, 11):
        error = refusal(request(output_start=length), frame(*range(length)))
        assert error.code is RefusalCode.CONTEXT_LENGTH


def test_an_answer_that_fills_the_context_may_be_continued() -> None:
    assert len(INTAKE.tokens(request(), frame(*range(10)))) == 10

"""Bodies: what is taken, and how every mistake is told."""

import json

import msgspec
import pytest
from pydantic import ValidationError

from pie.page.events import Epoch
from pie.page.key import pack_tokens
from pie.router.api.body import (
    INT64_MAX,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKENS,
    BodyLimits,
    parse_body,
)
from pie.router.api.chat import ChatBody
from pie.router.api.completions import CompletionBody
from pie.router.errors import ApiError
from pie.router.settings import RouterSettings
from pie.wire.messages import Generate
from pie.worker.intake import Intake

LIMITS = BodyLimits(max_choices=4, max_prompts=3, max_stop_strings=4, max_logprobs=20)
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: object) -> ChatBody:
    data = {"model": "m", "messages": HELLO} | fields
    return parse_body(ChatBody, json.dumps(data).encode(), LIMITS)


def completion(**fields: object) -> CompletionBody:
    data = {"model": "m", "prompt": "hello"} | fields
    return parse_body(CompletionBody, json.dumps(data).encode(), LIMITS)


def refused(**fields: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.kind == "invalid_request_error"
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "function", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id",
        ),
        ({"messages": "hello"}, "messages"),
        ({"model": 3}, "model"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", 3]}, "stop[1]"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]"),
        ({"top_k": 10**30}, "top_k"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": "a", "reasoning_content": "b"}]},
            "messages[0].reasoning_content",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format.more"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"temprature": 1}, "temprature"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_a_mistake_names_its_field(fields: dict[str, object], param: str | None) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param is None or param in error.message


def test_every_problem_is_told_at_once() -> None:
    error = refused(temperature="hot", n=99, max_tokens=-1, tools=[{}])
    for field in ("temperature", "n:", "max_tokens", "tools"):
        assert field in error.message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"null",
        b'{"model": "m", "messa',
        b'{"model": "m", "messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
        b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(ChatBody, data, LIMITS)
    assert caught.value.status == 400


def test_harmless_fields_and_values_that_ask_for_nothing_are_ignored() -> None:
    body = chat(
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        echo=False,
        best_of=1,
        user="me",
        frequency_penalty=None,
        anything=None,
    )
    assert body.user == "me"


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "x"}])
    assert body.messages[0].text == "one two"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_a_prompt_has_four_spellings(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], ["a", ""], [1, "a"], ["a", 1], 3, None, {}, [True], ["a"] * 4]
)
def test_other_prompts_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").startswith("prompt")


def test_sampling_says_what_was_asked() -> None:
    sampling = chat(
        temperature=0, top_k=-1, top_p=0.5, min_p=0.1, seed=7, logit_bias={"5": 1}
    ).sampling(logprobs=2, vocab_size=10)
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 0, 7)
    assert sampling.logit_bias == {5: 1.0}
    assert sampling.logprobs == 2


@pytest.mark.parametrize("fields", [{"logit_bias": {"10": 1}}, {"stop_token_ids": [10]}])
def test_token_ids_outside_the_vocabulary_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError, match="below 10"):
        chat(**fields).sampling(logprobs=None, vocab_size=10)


def test_whatever_a_body_may_ask_for_a_worker_takes() -> None:
    settings = RouterSettings(max_stop_strings=256, max_logprobs=256)
    limits = BodyLimits(
        max_choices=1,
        max_prompts=1,
        max_stop_strings=settings.max_stop_strings,
        max_logprobs=settings.max_logprobs,
    )
    largest = {
        "logit_bias": {str(token): -100 for token in range(MAX_LOGIT_BIASES)},
        "stop_token_ids": list(range(MAX_STOP_TOKENS)),
        "stop": ["s" * MAX_STOP_CHARS] * settings.max_stop_strings,
        "logprobs": True,
        "top_logprobs": settings.max_logprobs,
        "top_k": INT64_MAX,
        "seed": -INT64_MAX,
        "temperature": 2,
        "top_p": 1e-300,
        "min_p": 1,
        "frequency_penalty": -2,
        "presence_penalty": 2,
    }
    data = json.dumps({"model": "m", "messages": HELLO} | largest).encode()
    body = parse_body(ChatBody, data, limits)
    message = Generate(
        request_id="r",
        epoch=Epoch(1),
        output_start=1,
        max_tokens=1,
        sampling=body.sampling(logprobs=body.logprobs_wanted, vocab_size=10_000),
        stop=body.stops,
        stop_token_ids=tuple(body.stop_token_ids or ()),
    )
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Generate)
    intake = Intake(vocab_size=10_000, context_tokens=10)
    assert list(intake.tokens(sent, [memoryview(pack_tokens([1]))])) == [1]
    for limit in ("max_stop_strings", "max_logprobs"):
        with pytest.raises(ValidationError, match=limit):
            RouterSettings.model_validate({limit: 257})


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 0},
        {"best_of": 5},
        {"best_of": 2, "n": 3},
        {"best_of": 2, "stream": True},
        {"best_of": "all"},
    ],
)
def test_a_wrong_best_of_is_refused_by_its_name(fields: dict[str, object]) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**({"prompt": "a"} | fields))
    assert caught.value.param == "best_of"
    assert "best_of" in caught.value.message


def test_best_of_makes_more_sequences_than_it_answers() -> None:
    body = completion(prompt="a", best_of=3, n=2)
    assert (body.sequences, body.choices) == (3, 2)
    assert completion(prompt="a", n=2, best_of=2, stream=True).sequences == 2

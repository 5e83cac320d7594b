"""Structured answers of a real model, asked for with the official client."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(400)]

ASK: Any = [{"role": "user", "content": "Name a city of Norway and how many people live there."}]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(max_length=16)]
    country: Literal["Norway", "Sweden"]
    inhabitants: Annotated[int, Field(ge=0, le=9_999_999)]


def arguments(**more: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": ASK,
        "max_tokens": 250,
        "seed": 3,
        "temperature": 0.4,
        **more,
    }


def test_the_clients_own_parse_gets_its_model(client: Any) -> None:
    answer = client.chat.completions.parse(**arguments(response_format=City))
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, City)


def test_choices_and_streams_match_too(client: Any) -> None:
    schema = {"name": "city", "schema": City.model_json_schema()}
    asked = arguments(response_format={"type": "json_schema", "json_schema": schema}, n=2)
    answer = client.chat.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    for text in [*texts, *(choice.message.content for choice in answer.choices)]:
        City.model_validate_json(text)


def test_a_json_object_is_one(client: Any) -> None:
    answer = client.chat.completions.create(
        **arguments(response_format={"type": "json_object"}, max_tokens=60)
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


@pytest.mark.parametrize(
    ("extra", "matches"),
    [
        ({"guided_choice": ["Oslo", "Bergen"]}, "Oslo|Bergen"),
        ({"structured_outputs": {"regex": "[0-9]{3},[0-9]{3}"}}, "[0-9]{3},[0-9]{3}"),
    ],
)
def test_vllms_words_are_understood(client: Any, extra: dict[str, Any], matches: str) -> None:
    answer = client.chat.completions.create(**arguments(extra_body=extra))
    assert re.fullmatch(matches, answer.choices[0].message.content)
    plain = client.completions.create(
        model="smollm2", prompt="The largest city is", max_tokens=20, extra_body=extra
    )
    assert re.fullmatch(matches, plain.choices[0].text)


def test_a_wrong_schema_is_a_400_that_names_its_field(client: Any) -> None:
    bad: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "cow"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**arguments(response_format=bad))
    assert caught.value.param == "response_format"
    assert "cow" in caught.value.message


def test_a_call_that_must_be_made_needs_a_template_with_tools(client: Any) -> None:
    tool: Any = {"type": "function", "function": {"name": "weather"}}
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        client.chat.completions.create(**arguments(tools=[tool], tool_choice="required"))


def test_min_tokens_and_the_repetition_penalty_are_kept_to(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Say yes."}],
        temperature=0,
        max_tokens=40,
        extra_body={"min_tokens": 30},
    )
    assert answer.usage.completion_tokens >= 30
    words: Any = {"model": "smollm2", "prompt": "no no no no no no", "temperature": 0}
    again = client.completions.create(**words, max_tokens=12)
    other = client.completions.create(
        **words, max_tokens=12, extra_body={"repetition_penalty": 1.8}
    )
    assert other.choices[0].text != again.choices[0].text


def test_a_stop_string_can_be_shown(client: Any) -> None:
    arguments: Any = {"model": "smollm2", "prompt": "One, two, three,", "temperature": 0}
    shown = client.completions.create(
        **arguments, max_tokens=12, stop=[","], extra_body={"include_stop_str_in_output": True}
    )
    hidden = client.completions.create(**arguments, max_tokens=12, stop=[","])
    assert shown.choices[0].text == hidden.choices[0].text + ","

"""Tools with OpenAI's own client, over workers that answer in a model's own format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from pie.router.api.tools import Tool
from pie.router.tool_formats import HERMES, LLAMA3, MISTRAL, ToolFormat, format_of
from tests.router.conftest import Cluster
from tests.support.chat_folder import write_chat_folder
from tests.tokens.chat import TEMPLATES

CALL = {"name": "weather", "arguments": {"city": "Bergen", "days": 2}}
REPLY = f"Let me look.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TWO = f"{REPLY}\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
ASK: Any = [{"role": "user", "content": "What is the weather in Bergen?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]

Start = Callable[..., Any]


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Start:
    """Start a worker that answers with one text, and return a client."""

    async def start(reply: str, template: str = "qwen3") -> AsyncOpenAI:
        folder = write_chat_folder(tmp_path / "qwen")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = TEMPLATES[template]
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        cluster.mock("w0", reply=reply, tokenizer=str(folder))
        return cluster.openai(await cluster.router(1))

    return start


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [
        (call.function.name, json.loads(call.function.arguments))
        for call in message.tool_calls or []
    ]


@pytest.mark.live
async def test_an_answer_has_its_calls_apart(start: Start) -> None:
    client = await start(TWO)
    answer = await client.chat.completions.create(model="mock", messages=ASK, tools=TOOLS)
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "Let me look."
    assert calls_of(choice.message) == [("weather", CALL["arguments"])] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    one = await client.chat.completions.create(
        model="mock", messages=ASK, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(one.choices[0].message.tool_calls) == 1


@pytest.mark.live
async def test_a_streams_deltas_add_up_to_the_same(start: Start) -> None:
    client = await start(TWO)
    stream = await client.chat.completions.create(
        model="mock", messages=ASK, tools=TOOLS, stream=True
    )
    calls: dict[int, dict[str, str]] = {}
    content, finish = "", None
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                calls[delta.index] = {"id": delta.id, "name": delta.function.name, "text": ""}
            calls[delta.index]["text"] += delta.function.arguments or ""
    assert finish == "tool_calls"
    assert content.strip() == "Let me look."
    assert sorted(calls) == [0, 1]
    assert all(json.loads(call["text"]) == CALL["arguments"] for call in calls.values())
    assert calls[0]["id"] != calls[1]["id"]


@pytest.mark.live
async def test_the_clients_own_stream_helper_agrees(start: Start) -> None:
    client = await start(REPLY)
    async with client.chat.completions.stream(model="mock", messages=ASK, tools=TOOLS) as stream:
        final = await stream.get_final_completion()
    assert calls_of(final.choices[0].message) == [("weather", CALL["arguments"])]


@pytest.mark.live
async def test_with_tool_choice_none_it_is_text(start: Start) -> None:
    client = await start(REPLY)
    answer = await client.chat.completions.create(
        model="mock", messages=ASK, tools=TOOLS, tool_choice="none"
    )
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.live
async def test_results_go_back_to_the_model(start: Start, cluster: Cluster) -> None:
    client = await start(REPLY)
    first = await client.chat.completions.create(model="mock", messages=ASK, tools=TOOLS)
    message = first.choices[0].message
    messages = [
        *ASK,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain, 7 degrees"},
    ]
    second = await client.chat.completions.create(model="mock", messages=messages, tools=TOOLS)
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    # What the first prompt computed is the beginning of the second one.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 16 * 16


@pytest.mark.live
async def test_reasoning_is_apart_from_content(start: Start) -> None:
    client = await start("<think>\nBergen, so rain.\n</think>\n\nRain.")
    answer = await client.chat.completions.create(model="mock", messages=ASK)
    message = answer.choices[0].message
    assert message.content == "Rain."
    assert message.reasoning_content == "Bergen, so rain."
    raw = await client.chat.completions.create(
        model="mock", messages=ASK, extra_body={"separate_reasoning": False}
    )
    assert raw.choices[0].message.content.startswith("<think>")
    stream = await client.chat.completions.create(model="mock", messages=ASK, stream=True)
    content = reasoning = ""
    async for chunk in stream:
        content += chunk.choices[0].delta.content or ""
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (content, reasoning.strip()) == ("Rain.", "Bergen, so rain.")


@pytest.mark.live
async def test_the_templates_own_variables_can_be_set(start: Start, cluster: Cluster) -> None:
    client = await start("Rain.")
    asked: Any = {"model": "mock", "messages": ASK}
    plain = await client.chat.completions.create(**asked)
    quick = await client.chat.completions.create(
        **asked, extra_body={"chat_template_kwargs": {"enable_thinking": False}}
    )
    assert quick.usage.prompt_tokens > plain.usage.prompt_tokens
    bare = await client.chat.completions.create(
        **asked, extra_body={"add_generation_prompt": False}
    )
    assert bare.usage.prompt_tokens < plain.usage.prompt_tokens
    for name in ("messages", "tools", "not a name"):
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(
                **asked, extra_body={"chat_template_kwargs": {name: 1}}
            )


@pytest.mark.live
async def test_the_last_message_can_be_gone_on_with(start: Start, cluster: Cluster) -> None:
    client = await start(" and wind.")
    messages: Any = [*ASK, {"role": "assistant", "content": "Rain"}]
    more = {"extra_body": {"continue_final_message": True}}
    await client.chat.completions.create(model="mock", messages=messages, **more)
    [event] = cluster.mocks[0].events("generate")
    tokens: Any = event["tokens"]
    prompt = cluster.tokenizer(cluster.mocks[0]).decode(tokens, skip_special_tokens=False)
    assert prompt.endswith("assistant\nRain")
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        await client.chat.completions.create(model="mock", messages=ASK, **more)


@pytest.mark.live
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
        ),
    ],
)
async def test_what_does_not_go_together_is_a_400(
    start: Start, fields: dict[str, Any], param: str
) -> None:
    client = await start(REPLY)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="mock", messages=ASK, **fields)
    assert caught.value.param == param


@pytest.mark.live
async def test_a_model_whose_template_takes_no_tools_says_so(cluster: Cluster) -> None:
    cluster.mock("w0")
    client = cluster.openai(await cluster.router(1))
    with pytest.raises(openai.BadRequestError, match="takes no tools"):
        await client.chat.completions.create(model="mock", messages=ASK, tools=TOOLS)


@pytest.mark.parametrize(
    ("template", "format_"),
    [("qwen3", HERMES), ("mistral", MISTRAL), ("llama3", LLAMA3), ("chatml", None)],
)
def test_a_template_tells_its_format(template: str, format_: ToolFormat | None) -> None:
    assert format_of(TEMPLATES[template]) is format_


def test_a_tool_is_what_templates_read() -> None:
    tool = Tool.model_validate(TOOLS[0])
    assert tool.plain() == TOOLS[0]

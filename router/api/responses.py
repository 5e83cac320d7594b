"""`/v1/responses`: the body, as the chat that it means.

Covers schemas, and turning items into messages. Does not cover answers
(`pie.router.api.responses_answers`) or keeping them for the next turn (`pie.router.responding`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from pie.router.api.body import INT64_MAX
from pie.router.api.conversation import MAX_MESSAGES, MAX_PARTS
from pie.router.api.tools import MAX_NAME_CHARS, MAX_TOOLS
from pie.router.errors import invalid

Message = dict[str, Any]
"""A message of a chat's body."""

_STRICT = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())
_MAX_METADATA = 16
_REFUSED = ("messages", "max_tokens", "max_completion_tokens", "response_format", "stream_options")
"""What a chat calls otherwise."""
_NONE_OF: Mapping[str, Sequence[object]] = {
    "n": (1,),
    "stop": ([], ""),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
}
"""What a response has none of, with values that ask for nothing."""


class ItemText(BaseModel):
    """A part of a message's content. Only text is understood."""

    model_config = _STRICT

    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(BaseModel):
    """A message."""

    model_config = _STRICT

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[ItemText], Field(fail_fast=True, max_length=MAX_PARTS)]

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class CallItem(BaseModel):
    """A call of an earlier turn."""

    model_config = _STRICT

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON.")


class ResultItem(BaseModel):
    """What came of a call."""

    model_config = _STRICT

    type: Literal["function_call_output"]
    call_id: str
    output: str


class ReasoningItem(BaseModel):
    """What a model thought in an earlier turn: passed over."""

    model_config = _STRICT

    type: Literal["reasoning"]


def _item_kind(value: object) -> str:
    """Tell items apart by their type; a message may leave it out."""
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"~{kind}"


_Item = Annotated[
    Annotated[MessageItem, Tag("~message")]
    | Annotated[CallItem, Tag("~function_call")]
    | Annotated[ResultItem, Tag("~function_call_output")]
    | Annotated[ReasoningItem, Tag("~reasoning")],
    Discriminator(
        _item_kind,
        custom_error_type="bad_item",
        custom_error_message="must be a message, function_call, function_call_output or reasoning",
    ),
]


def _input_kind(value: object) -> str:
    return "~items" if isinstance(value, list) else "~text"


class ResponseTool(BaseModel):
    """A function that the model may call; there are no other tools."""

    model_config = _STRICT

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(BaseModel):
    """What the text must look like."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    format: dict[str, Any] | None = Field(
        default=None,
        description="`text`, `json_object`, or `json_schema` with `name` and `schema`.",
    )


class ResponsesBody(BaseModel):
    """Body of `/v1/responses`. Fields that it shares with chats are read as theirs."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", protected_namespaces=())

    model: str = Field(description="Name of a served model, see `/v1/models`.")
    input: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[
            list[_Item], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES), Tag("~items")
        ],
        Discriminator(_input_kind),
    ] = Field(description="A user's message, or items.")
    instructions: str | None = Field(
        default=None, description="A system message before all others, for this response alone."
    )
    previous_response_id: str | None = Field(
        default=None, max_length=128, description="Go on after this response."
    )
    store: bool | None = Field(
        default=None, description="Keep the response to be gone on with: true is the default."
    )
    stream: bool | None = Field(default=None, description="Send events while it is made.")
    max_output_tokens: int | None = Field(
        default=None, ge=1, le=INT64_MAX, description="Most tokens to generate."
    )
    text: TextSettings | None = None
    tools: Annotated[list[ResponseTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="`auto`, `none`, `required`, or a function by its `name`."
    )
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = Field(
        default=None, description="Answered as it is."
    )

    def said(self) -> list[Message]:
        """Return the messages that the input adds to a conversation."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return list(_messages(self.input))

    def chat(self, before: Sequence[Message]) -> Mapping[str, object]:
        """Return the body of the chat that this means, after the messages of earlier responses.

        Raises:
            ApiError: A field is a chat's and not a response's.
        """
        extra = {k: v for k, v in (self.model_extra or {}).items() if v is not None}
        for name in _REFUSED:
            if name in extra:
                raise invalid(f"{name}: unknown field", name, "unknown_parameter")
        for name, nothing in _NONE_OF.items():
            if name in extra and extra.pop(name) not in nothing:
                raise invalid(f"{name}: not supported", name, "unsupported_parameter")
        chat: dict[str, object] = {
            **extra,
            "model": self.model,
            "messages": [
                *([{"role": "system", "content": self.instructions}] if self.instructions else ()),
                *before,
                *self.said(),
            ],
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _format(self.text),
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _choice(self.tool_choice),
        }
        return {name: value for name, value in chat.items() if value is not None}


def _messages(items: Sequence[object]) -> Iterator[Message]:
    """Yield items as messages: calls next to each other, and text before them, are one message."""
    pending: Message | None = None
    for item in items:
        if isinstance(item, CallItem):
            pending = pending or {"role": "assistant", "content": None, "tool_calls": []}
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            pending.setdefault("tool_calls", []).append(call)
            continue
        if isinstance(item, ReasoningItem):
            continue
        if pending is not None:
            yield pending
            pending = None
        if isinstance(item, ResultItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        elif isinstance(item, MessageItem):
            message = {"role": item.role, "content": item.text}
            if item.role == "assistant":
                pending = message
            else:
                yield message
    if pending is not None:
        yield pending


def _format(text: TextSettings | None) -> object:
    """Return `text.format` as a chat spells it."""
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    schema = {name: value for name, value in text.format.items() if name != "type"}
    return {"type": "json_schema", "json_schema": schema}


def _tool(tool: ResponseTool) -> Mapping[str, object]:
    function = tool.model_dump(exclude={"type"}, exclude_none=True)
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> object:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice

"""`/v1/responses`: the shape of answers and stream events.

Covers shaping one response, whole or event by event. Does not cover bodies
(`pie.router.api.responses`) or keeping responses (`pie.router.responding`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pie.router.api.responses import Message, ResponsesBody
from pie.router.api.usage import Usage
from pie.router.mailbox import Piece
from pie.router.reading import (
    AnswerReader,
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
)
from pie.router.sse import TypedEvent
from pie.wire.messages import FinishReason


class OutputText(msgspec.Struct, tag="output_text"):
    """The text of a message."""

    text: str
    annotations: list[None] = []


class ReasoningText(msgspec.Struct, tag="reasoning_text"):
    """The text of a model's reasoning."""

    text: str


Status = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, tag="message"):
    """What the model says."""

    id: str
    status: Status = "in_progress"
    content: list[OutputText] = []
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag="reasoning"):
    """What the model thought."""

    id: str
    status: Status = "in_progress"
    content: list[ReasoningText] = []
    summary: list[None] = []


class OutputCall(msgspec.Struct, tag="function_call"):
    """A function that the model calls."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct):
    """What became of the input's tokens."""

    cached_tokens: int


class OutputDetails(msgspec.Struct):
    """What the output's tokens are."""

    reasoning_tokens: int = 0
    """Not counted apart."""


class ResponseUsage(msgspec.Struct):
    """Tokens read and made."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(msgspec.Struct):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Response(msgspec.Struct):
    """Answer of `/v1/responses`."""

    id: str
    created_at: int
    model: str
    output: list[OutputItem]
    status: Status
    instructions: str | None
    max_output_tokens: int | None
    previous_response_id: str | None
    store: bool
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tools: list[dict[str, Any]]
    tool_choice: Any
    text: dict[str, Any]
    metadata: dict[str, str]
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    error: None = None
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


class ResponseEvent(TypedEvent, kw_only=True):
    """One event of a stream; each type has some of these fields."""

    sequence_number: int
    response: Response | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[None] | UnsetType = UNSET


Keep = Callable[[Response, Message], None]
"""Told of a response that has ended, and of the message that it adds to the conversation."""


class ResponsesShaper:
    """Shapes one response.

    Args:
        request_id: Names it.
        created_s: When it came, in seconds of the Unix epoch.
        model: Who answers.
        usage_events: Not used: the last event of a response always has the usage.
        reader: Makes what reads the text; None where text is content.
        id_chars: Length of the ids of calls.
        body: What was asked.
        keep: Told of the response at its end.
    """

    def __init__(
        self,
        request_id: str,
        created_s: int,
        model: str,
        *,
        usage_events: bool,
        reader: Callable[[], AnswerReader] | None,
        id_chars: int,
        body: ResponsesBody,
        keep: Keep,
    ) -> None:
        del usage_events, id_chars
        extra = body.model_extra or {}
        self._reader = None if reader is None else reader()
        self._keep = keep
        self._number = 0
        self._text = ""
        self._finish: FinishReason | None = None
        self._response = Response(
            id=response_id(request_id),
            created_at=created_s,
            model=model,
            output=[],
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            previous_response_id=body.previous_response_id,
            store=body.store is not False,
            temperature=1.0 if extra.get("temperature") is None else extra["temperature"],
            top_p=1.0 if extra.get("top_p") is None else extra["top_p"],
            parallel_tool_calls=extra.get("parallel_tool_calls") is not False,
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            tool_choice=body.tool_choice or "auto",
            text={"format": (body.text and body.text.format) or {"type": "text"}},
            metadata=body.metadata or {},
        )

    def answer(self, pieces: Sequence[Piece], counts: Usage) -> Response:
        """Return the whole answer."""
        for piece in pieces:
            self.events(piece)
        self._end(counts)
        return self._response

    def opening(self, choices: int) -> list[ResponseEvent]:
        """Return the events that say that it has begun."""
        del choices
        begun = [self._event("created"), self._event("in_progress")]
        for event in begun:
            event.response = msgspec.structs.replace(self._response, output=[])
        return begun

    def events(self, piece: Piece) -> list[ResponseEvent]:
        """Return the events for what was made."""
        self._text += piece.text
        self._finish = piece.finish
        found: list[ResponseEvent] = []
        for part in self._read(piece):
            found += self._added(part)
        if piece.finish is not None:
            found += self._item_done()
        return found

    def closing(self, counts: Usage) -> ResponseEvent:
        """Return the event that has the whole response."""
        self._end(counts)
        event = self._event(self._response.status)
        event.response = self._response
        return event

    def _read(self, piece: Piece) -> list[Part]:
        if self._reader is None:
            return [Content(piece.text)] if piece.text else []
        return [
            *self._reader.push(piece.text),
            *(self._reader.end() if piece.finish is not None else ()),
        ]

    def _added(self, part: Part) -> Iterator[ResponseEvent]:
        """Take in a part of the answer."""
        match part:
            case Content(text):
                if not isinstance(self._last, OutputMessage):
                    yield from self._begin(OutputMessage(_id("msg"), content=[OutputText("")]))
                yield from self._more(text, "output_text", logprobs=[])
            case Reasoning(text):
                if not isinstance(self._last, OutputReasoning):
                    yield from self._begin(OutputReasoning(_id("rs"), content=[ReasoningText("")]))
                yield from self._more(text, "reasoning_text")
            case CallBegun(_, name):
                yield from self._begin(OutputCall(_id("fc"), _id("call"), name))
            case CallArguments(_, text):
                call = self._last
                assert isinstance(call, OutputCall)
                call.arguments += text
                event = self._event("function_call_arguments.delta", in_item=True)
                event.delta = text
                yield event

    @property
    def _last(self) -> OutputItem | None:
        """The item that is being made."""
        output = self._response.output
        return output[-1] if output and output[-1].status == "in_progress" else None

    def _begin(self, item: OutputItem) -> Iterator[ResponseEvent]:
        """End the item before, and begin another one."""
        yield from self._item_done()
        self._response.output.append(item)
        added = self._event("output_item.added", in_item=True)
        added.item, added.item_id = msgspec.structs.replace(item), UNSET
        if not isinstance(item, OutputCall):
            added.item.content = []  # type: ignore[union-attr]
        yield added
        if not isinstance(item, OutputCall):
            part = self._event("content_part.added", in_item=True)
            part.content_index, part.part = 0, msgspec.structs.replace(item.content[0])
            yield part

    def _more(
        self, text: str, kind: str, logprobs: list[None] | UnsetType = UNSET
    ) -> Iterator[ResponseEvent]:
        item = self._last
        assert isinstance(item, OutputMessage | OutputReasoning)
        item.content[0].text += text
        event = self._event(f"{kind}.delta", in_item=True)
        event.content_index, event.delta, event.logprobs = 0, text, logprobs
        yield event

    def _item_done(self) -> Iterator[ResponseEvent]:
        """Return the events that end the item that is being made, if there is one."""
        item = self._last
        if item is None:
            return
        if isinstance(item, OutputCall):
            event = self._event("function_call_arguments.done", in_item=True)
            event.arguments = item.arguments
            yield event
        else:
            part = item.content[0]
            kind = "output_text" if isinstance(part, OutputText) else "reasoning_text"
            event = self._event(f"{kind}.done", in_item=True)
            event.content_index, event.text = 0, part.text
            event.logprobs = [] if isinstance(item, OutputMessage) else UNSET
            yield event
            event = self._event("content_part.done", in_item=True)
            event.content_index, event.part = 0, part
            yield event
        event = self._event("output_item.done", in_item=True)
        item.status = "incomplete" if self._finish is FinishReason.LENGTH else "completed"
        event.item, event.item_id = item, UNSET
        yield event

    def _end(self, counts: Usage) -> None:
        response = self._response
        if self._finish is FinishReason.LENGTH:
            response.status, response.incomplete_details = "incomplete", Incomplete()
        else:
            response.status = "completed"
        response.usage = ResponseUsage(
            counts.prompt_tokens,
            InputDetails(counts.prompt_tokens_details.cached_tokens),
            counts.completion_tokens,
            OutputDetails(),
            counts.total_tokens,
        )
        self._keep(response, self._message())

    def _message(self) -> Message:
        """Return the answer as the next turn's conversation has it."""
        items = self._response.output
        content = "".join(item.content[0].text for item in items if isinstance(item, OutputMessage))
        calls = [
            {
                "id": item.call_id,
                "type": "function",
                "function": {"name": item.name, "arguments": item.arguments},
            }
            for item in items
            if isinstance(item, OutputCall)
        ]
        return {"role": "assistant", "content": content} | ({"tool_calls": calls} if calls else {})

    def _event(self, kind: str, *, in_item: bool = False) -> ResponseEvent:
        event = ResponseEvent(type=f"response.{kind}", sequence_number=self._number)
        self._number += 1
        if in_item:
            event.output_index = len(self._response.output) - 1
            event.item_id = self._response.output[-1].id
        return event


def response_id(request_id: str) -> str:
    """Return what the response to a request is called."""
    return f"resp_{request_id}"


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"

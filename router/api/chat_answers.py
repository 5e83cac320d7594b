"""`/v1/chat/completions`: the shape of answers and stream events.

Covers shaping. Does not cover bodies (`pie.router.api.chat`) or telling reasoning and calls from
content (`pie.router.reading`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from pie.router.api.scoring import LOWEST_LOGPROB, PromptLogprobs, of_prompt, prompt_logprobs
from pie.router.api.tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from pie.router.api.usage import Usage, finish_text
from pie.router.mailbox import Piece
from pie.router.reading import (
    AnswerReader,
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
)
from pie.wire.messages import FinishReason, PositionLogprobs, TokenLogprob

_PREFIXED_ID_CHARS = 16
"""Shorter ids have no room for a prefix."""


class TopLogprob(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The token drawn at a position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of the tokens of an answer, or of a part of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct):
    """The model's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    """What a reasoning model thought before its answer."""
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None = None


class ChatCompletion(msgspec.Struct):
    """Answer of `/v1/chat/completions` without `stream`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Where they were asked for."""


class ChatDelta(msgspec.Struct):
    """What an event adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET

    @property
    def is_something(self) -> bool:
        """Whether it adds anything."""
        return any(getattr(self, field) is not UNSET for field in self.__struct_fields__)


class ChatChunkChoice(msgspec.Struct):
    """What an event adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None


class ChatChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


def chat_logprobs(positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
    """Return log-probabilities in the shape of chat answers."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                *_spelled(position.chosen),
                top_logprobs=[TopLogprob(*_spelled(top)) for top in position.top],
            )
            for position in positions
        ]
    )


def _spelled(token: TokenLogprob) -> tuple[str, float, list[int]]:
    """Return a token as text, log-probability and bytes."""
    text = token.token.decode("utf-8", errors="replace")
    return text, max(token.logprob, LOWEST_LOGPROB), list(token.token)


class ChatShaper:
    """Shapes the pieces of one request.

    Args:
        request_id: Names it.
        created_s: When it came, in seconds of the Unix epoch.
        model: Who answers.
        usage_events: Whether a stream's events say that they have no usage.
        reader: Makes what reads one choice's text; None where text is content.
        id_chars: Length of the ids of calls.
    """

    def __init__(
        self,
        request_id: str,
        created_s: int,
        model: str,
        *,
        usage_events: bool,
        reader: Callable[[], AnswerReader] | None = None,
        id_chars: int = 24,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created_s = created_s
        self._model = model
        self._no_usage: UnsetType | None = None if usage_events else UNSET
        self._reader = reader
        self._id_chars = id_chars
        self._readers: dict[int, AnswerReader] = {}

    def answer(self, pieces: Sequence[Piece], counts: Usage) -> ChatCompletion:
        """Return the whole answer."""
        told = of_prompt(pieces)
        return ChatCompletion(
            self._id,
            self._created_s,
            self._model,
            [
                ChatChoice(
                    piece.index,
                    self._message(piece),
                    self._finish(piece) or "stop",
                    chat_logprobs(piece.logprobs) if piece.logprobs else None,
                )
                for piece in pieces
            ],
            counts,
            prompt_logprobs=UNSET if told is None else prompt_logprobs(told),
        )

    def opening(self, choices: int) -> list[ChatChunk]:
        """Return the events that say who speaks."""
        return [
            self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))
            for index in range(choices)
        ]

    def events(self, piece: Piece) -> list[ChatChunk]:
        """Return the event for what a sequence made; none where nothing of it is known yet."""
        delta = self._delta(piece)
        if not (delta.is_something or piece.finish or piece.logprobs):
            return []
        logprobs = chat_logprobs(piece.logprobs) if piece.logprobs else None
        return [self._chunk(ChatChunkChoice(piece.index, delta, logprobs, self._finish(piece)))]

    def closing(self, counts: Usage) -> ChatChunk:
        """Return the event that has the usage."""
        return ChatChunk(self._id, self._created_s, self._model, [], usage=counts)

    def _read(self, piece: Piece) -> list[Part]:
        """Return the parts of what a sequence made."""
        if self._reader is None:
            return [Content(piece.text)] if piece.text else []
        reader = self._readers.get(piece.index)
        if reader is None:
            reader = self._readers[piece.index] = self._reader()
        return [*reader.push(piece.text), *(reader.end() if piece.finish else ())]

    def _finish(self, piece: Piece) -> Literal["stop", "length", "tool_calls"] | None:
        reader = self._readers.get(piece.index)
        called = reader is not None and reader.calls > 0
        if called and piece.finish is FinishReason.STOP:
            return "tool_calls"
        return finish_text(piece.finish)

    def _message(self, piece: Piece) -> AnswerMessage:
        content, reasoning = "", ""
        calls: list[ToolCall] = []
        for part in self._read(piece):
            match part:
                case Content(text):
                    content += text
                case Reasoning(text):
                    reasoning += text
                case CallBegun(_, name):
                    calls.append(ToolCall(self._call_id(), FunctionCall(name, "")))
                case CallArguments(_, text):
                    calls[-1].function.arguments += text
        return AnswerMessage(
            content if content or not calls else None,
            reasoning_content=reasoning.strip() or UNSET,
            tool_calls=calls or UNSET,
        )

    def _delta(self, piece: Piece) -> ChatDelta:
        delta = ChatDelta()
        calls: dict[int, ToolCallDelta] = {}
        for part in self._read(piece):
            match part:
                case Content(text):
                    delta.content = (delta.content or "") + text
                case Reasoning(text):
                    delta.reasoning_content = (delta.reasoning_content or "") + text
                case CallBegun(index, name):
                    function = FunctionDelta(name, "")
                    calls[index] = ToolCallDelta(index, self._call_id(), "function", function)
                case CallArguments(index, text):
                    begun = calls.setdefault(index, ToolCallDelta(index, function=FunctionDelta()))
                    assert begun.function is not UNSET
                    begun.function.arguments = (begun.function.arguments or "") + text
        if calls:
            delta.tool_calls = list(calls.values())
        return delta

    def _call_id(self) -> str:
        """Return a name for a call."""
        if self._id_chars < _PREFIXED_ID_CHARS:
            return secrets.token_hex(self._id_chars)[: self._id_chars]
        return f"call_{secrets.token_hex(self._id_chars // 2)}"

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(self._id, self._created_s, self._model, [choice], usage=self._no_usage)

"""`/v1/chat/completions`: the body, and the shape of answers and stream events.

Covers schemas and shaping. Does not cover templates (`pie.router.prompt`) or who generates
(`pie.router.dispatch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pie.router.api.body import INT64_MAX, BodyLimits, GenerationBody
from pie.router.api.usage import Usage, finish_text
from pie.router.mailbox import Piece
from pie.wire.messages import PositionLogprobs, TokenLogprob

MAX_MESSAGES = 16_384
MAX_PARTS = 16_384


class TextPart(BaseModel):
    """A part of a message's content. Only text is understood."""

    model_config = ConfigDict(frozen=True, strict=True)

    type: Literal["text"]
    text: str


def _content_kind(value: object) -> str:
    """Tell a string from a list of parts."""
    return "~parts" if isinstance(value, list) else "~text"


class ChatMessage(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(frozen=True, strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag("~text")]
        | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("~parts")],
        Discriminator(_content_kind),
    ]
    name: str | None = Field(default=None, description="Not used.")

    @field_validator("role", mode="before")
    @classmethod
    def _role_of_no_tool(cls, value: object) -> object:
        if value in ("tool", "function"):
            raise PydanticCustomError("tool_role", "messages of tools are not supported")
        return value

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation so far."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=INT64_MAX, description="The newer name of `max_tokens`."
    )
    logprobs: bool | None = Field(
        default=None, description="Report the log-probability of each token."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Likeliest tokens to report at each position."
    )

    @field_validator("top_logprobs")
    @classmethod
    def _top_logprobs_within_limit(cls, value: int | None, info: ValidationInfo) -> int | None:
        limits = info.context
        if value is not None and isinstance(limits, BodyLimits) and value > limits.max_logprobs:
            raise PydanticCustomError(
                "too_many", "must be at most {most}", {"most": limits.max_logprobs}
            )
        return value

    @model_validator(mode="after")
    def _top_logprobs_with_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "top_logprobs", "top_logprobs: only allowed where logprobs is true"
            )
        return self

    @property
    def token_limit(self) -> tuple[str, int | None]:
        """The field that bounds the answer, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    @property
    def logprobs_wanted(self) -> int | None:
        """Likeliest tokens to report at each position; None where none is asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None


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

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One answer."""

    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length"]
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


class ChatDelta(msgspec.Struct):
    """What an event adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What an event adds to a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(msgspec.Struct):
    """One event of a chat stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET


LOWEST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON cannot spell."""


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
    """Shapes the pieces of one request."""

    content_field = "messages"

    def __init__(self, request_id: str, created_s: int, model: str, *, usage_events: bool) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created_s = created_s
        self._model = model
        self._no_usage: UnsetType | None = None if usage_events else UNSET

    def answer(self, pieces: Sequence[Piece], counts: Usage) -> ChatCompletion:
        """Return the whole answer."""
        return ChatCompletion(
            self._id,
            self._created_s,
            self._model,
            [
                ChatChoice(
                    piece.index,
                    AnswerMessage(piece.text),
                    finish_text(piece.finish) or "stop",
                    chat_logprobs(piece.logprobs) if piece.logprobs else None,
                )
                for piece in pieces
            ],
            counts,
        )

    def opening(self, choices: int) -> list[ChatChunk]:
        """Return the events that say who speaks."""
        return [
            self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))
            for index in range(choices)
        ]

    def event(self, piece: Piece) -> ChatChunk:
        """Return the event for what a sequence made."""
        text = piece.text
        return self._chunk(
            ChatChunkChoice(
                piece.index,
                ChatDelta(content=text) if text or not piece.finish else ChatDelta(),
                chat_logprobs(piece.logprobs) if piece.logprobs else None,
                finish_text(piece.finish),
            )
        )

    def closing(self, counts: Usage) -> ChatChunk:
        """Return the event that has the usage."""
        return ChatChunk(self._id, self._created_s, self._model, [], usage=counts)

    def _chunk(self, choice: ChatChunkChoice) -> ChatChunk:
        return ChatChunk(self._id, self._created_s, self._model, [choice], usage=self._no_usage)

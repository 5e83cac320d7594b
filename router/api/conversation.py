"""Conversations in bodies: messages, tools, and what a chat template is told besides.

Covers the fields that every endpoint with messages shares. Does not cover what is special to one
(`pie.router.api.chat`, `pie.router.api.tokens`) or rendering (`pie.router.prompt`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from pie.router.api.tools import MAX_CALLS, MAX_TOOLS, PastCall, Tool
from pie.router.errors import shown

MAX_MESSAGES = 8_192
MAX_PARTS = 8_192
_OUR_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "self")


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

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("~text")]
            | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("~parts")],
            Discriminator(_content_kind),
        ]
        | None
    ) = Field(default=None, description="May be left out where there are `tool_calls`.")
    name: str | None = Field(default=None, description="Of a tool; not used otherwise.")
    tool_calls: Annotated[list[PastCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = (
        Field(default=None, description="Of an assistant: what it called.")
    )
    tool_call_id: str | None = Field(
        default=None, description="Of a tool: the call that this is the result of."
    )
    reasoning_content: str | None = Field(
        default=None, description="Of an assistant: what it thought, for templates that read it."
    )

    @model_validator(mode="after")
    def _parts_of_its_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("missing", "is required", {"field": "content"})
        for field in ("tool_calls", "reasoning_content"):
            if getattr(self, field) and self.role != "assistant":
                raise PydanticCustomError("wrong_role", "only of an assistant", {"field": field})
        return self

    @property
    def text(self) -> str:
        """The content as one string."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    def plain(self) -> dict[str, object]:
        """Return it as templates read it."""
        plain: dict[str, object] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.reasoning_content:
            plain["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            plain |= {"name": self.name, "tool_call_id": self.tool_call_id}
        return plain


class ConversationBody(BaseModel):
    """What a chat template is given."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(
        min_length=1, max_length=MAX_MESSAGES, description="The conversation so far."
    )
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="What else the chat template reads, such as `enable_thinking`."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="Whether the prompt ends with the beginning of an answer."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Go on with the last message, an assistant's, as it stands."
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _kwargs_are_no_arguments(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or ():
            if name in _OUR_VARIABLES or not name.isidentifier():
                raise PydanticCustomError(
                    "bad_kwarg", "{name} cannot be set here", {"name": repr(shown(name))}
                )
        return value

    @model_validator(mode="after")
    def _final_message_to_continue(self) -> Self:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message",
                "continue_final_message: not together with add_generation_prompt",
            )
        if self.messages[-1].role != "assistant" or not self.messages[-1].text:
            raise PydanticCustomError(
                "continue_final_message",
                "continue_final_message: only where the last message is an assistant's text",
            )
        return self

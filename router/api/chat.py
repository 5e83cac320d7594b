"""`/v1/chat/completions`: the body.

Covers its schema. Does not cover answers (`pie.router.api.chat_answers`), templates
(`pie.router.prompt`) or who generates (`pie.router.dispatch`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

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
from pie.router.api.tools import MAX_CALLS, MAX_TOOLS, NamedTool, PastCall, Tool, ToolChoice
from pie.router.errors import shown

MAX_MESSAGES = 16_384
MAX_PARTS = 16_384
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

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        default=None, description="Functions that the model may call."
    )
    tool_choice: ToolChoice | None = Field(
        default=None, description="Whether it may, must not or must, or which one it must call."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls: true is the default."
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
    separate_reasoning: bool | None = Field(
        default=None, description="Answer reasoning apart from content: true is the default."
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
    def _choice_among_the_tools(self) -> Self:
        choice, tools = self.tool_choice, self.tools or []
        if choice not in (None, "none", "auto") and not tools:
            raise PydanticCustomError("tool_choice", "tool_choice: only allowed where tools are")
        if isinstance(choice, NamedTool) and not any(
            tool.function.name == choice.function.name for tool in tools
        ):
            raise PydanticCustomError(
                "tool_choice",
                "tool_choice: {name} is none of the tools",
                {"name": repr(shown(choice.function.name))},
            )
        return self

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

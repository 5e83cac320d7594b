"""`/v1/chat/completions`: the body.

Covers its schema. Does not cover messages (`pie.router.api.conversation`), answers (`pie.router.api.chat_answers`), templates
(`pie.router.prompt`) or who generates (`pie.router.dispatch`).
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pie.router.api.body import INT64_MAX, BodyLimits, GenerationBody
from pie.router.api.conversation import ConversationBody
from pie.router.api.tools import NamedTool, ToolChoice
from pie.router.errors import shown


class ChatBody(ConversationBody, GenerationBody):
    """Body of `/v1/chat/completions`."""

    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=INT64_MAX, description="The newer name of `max_tokens`."
    )
    logprobs: bool | None = Field(
        default=None, description="Report the log-probability of each token."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Likeliest tokens to report at each position."
    )

    tool_choice: ToolChoice | None = Field(
        default=None, description="Whether it may, must not or must, or which one it must call."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="Whether there may be several calls: true is the default."
    )
    separate_reasoning: bool | None = Field(
        default=None, description="Answer reasoning apart from content: true is the default."
    )

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

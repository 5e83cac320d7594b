"""Tools in chat bodies and answers: what a model may call, and what it called.

Covers schemas and shapes. Does not cover how models spell calls (`pie.router.tool_formats`).
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_TOOLS = 512
MAX_CALLS = 1024
MAX_NAME_CHARS = 256

_STRICT = ConfigDict(frozen=True, strict=True, extra="ignore")

_Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT

    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        default=None, description="JSON Schema of its arguments; without one, any object."
    )
    strict: bool | None = Field(default=None, description="Not used.")


class Tool(BaseModel):
    """A tool; there are no others than functions."""

    model_config = _STRICT

    type: Literal["function"]
    function: FunctionSpec

    def plain(self) -> dict[str, object]:
        """Return it as templates read it."""
        return self.model_dump(exclude_none=True)


class NamedFunction(BaseModel):
    """The name of a function."""

    model_config = _STRICT

    name: _Name


class NamedTool(BaseModel):
    """The one tool that must be called."""

    model_config = _STRICT

    type: Literal["function"]
    function: NamedFunction


def _choice_kind(value: object) -> str:
    """Tell a mode from a named tool."""
    return "~mode" if isinstance(value, str) else "~named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("~mode")]
    | Annotated[NamedTool, Tag("~named")],
    Discriminator(_choice_kind),
]


class CalledFunction(BaseModel):
    """A function and the arguments that it was called with."""

    model_config = _STRICT

    name: _Name
    arguments: str = Field(description="JSON.")


class PastCall(BaseModel):
    """A call of an earlier turn."""

    model_config = _STRICT

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def plain(self) -> dict[str, object]:
        """Return it as templates read it: they want arguments, not their text, where that is JSON."""
        arguments: object = self.function.arguments
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            arguments = msgspec.json.decode(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class FunctionCall(msgspec.Struct):
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON."""


class ToolCall(msgspec.Struct):
    """A call in an answer."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct):
    """What an event adds to a call's function."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """What an event adds to a call."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET

"""`/v1/inferlets` and `/v1/inferlet-runs`: bodies and shapes."""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pie.router.api.bulk import check_numbers
from pie.router.api.problems import problems_of, refuse

_MOST_ARGUMENTS = 256
_MOST_NAME_CHARS = 200
_Name = Annotated[str, Field(min_length=1, max_length=_MOST_NAME_CHARS)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class InstallBody(_Strict):
    """A program to keep."""

    source: str = Field(min_length=1, description="The program's text, Python.")
    name: _Name = Field(
        default="program.py",
        pattern=r"^[^\x00-\x1f<>]*$",
        description="What it is called in lists and tracebacks.",
    )


class TurnBody(_Strict):
    """One message of a conversation."""

    role: str = Field(min_length=1, max_length=_MOST_NAME_CHARS)
    content: str


class RunBody(_Strict):
    """How a program is run."""

    arguments: dict[_Name, str | bool | int | float] = Field(
        default={}, max_length=_MOST_ARGUMENTS, description="By the parameters' names."
    )
    entry: str = Field(
        default="main",
        max_length=_MOST_NAME_CHARS,
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        description="The function to call.",
    )
    model: str | None = Field(
        default=None, description="On which model; by default the one that is served."
    )
    begins_with: str | Annotated[list[TurnBody], Field(max_length=1024)] | None = Field(
        default=None,
        description="What its first working set begins with, a text or messages: it is run where most "
        "of that is held. By default the argument `prompt` as a user's message.",
    )
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Share cached pages only with requests that carry the same salt.",
    )
    session_id: str | None = Field(
        default=None,
        max_length=512,
        description="The conversation that its pages are of, for routing and retention rules.",
    )

    @property
    def texts(self) -> dict[str, str]:
        """The arguments as a program takes them."""
        return {name: _text(value) for name, value in self.arguments.items()}


class MessageBody(_Strict):
    """A message for a program."""

    text: str | None = Field(description="The message; null says that no more come.")


class Inferlet(msgspec.Struct):
    """A program that is kept."""

    id: str
    """A hash of whose it is, its name and its text."""
    name: str
    bytes: int
    created: int
    object: Literal["inferlet"] = "inferlet"


class InferletList(msgspec.Struct):
    """The programs that are kept, the latest used last."""

    data: list[Inferlet]
    object: Literal["list"] = "list"


class RunEvent(msgspec.Struct, omit_defaults=True):
    """What became of a run; the last one has the type `ended`."""

    type: Literal["started", "said", "printed", "running", "ended"]
    run: str = ""
    """With `started`: the run's name."""
    worker: str = ""
    """With `started`: where it runs."""
    text: str = ""
    """With `said` and `printed`."""
    reason: str = ""
    """With `ended`: `finished`, or why it did not."""
    result: str = ""
    """With `ended`: what its function returned, as text."""
    error: str = ""
    """With `ended`: what went wrong."""


class Done(msgspec.Struct):
    """It was done."""

    ok: bool = True


_B = TypeVar("_B", bound=_Strict)


def parse(kind: type[_B], data: bytes) -> _B:
    """Return the body that `data` spells.

    Raises:
        ApiError: 400 that names the problems.
    """
    check_numbers(data)
    try:
        return kind.model_validate_json(data or b"{}")
    except ValidationError as error:
        refuse(problems_of(error))
        raise


def _text(value: str | bool | float) -> str:
    return value if isinstance(value, str) else str(value)

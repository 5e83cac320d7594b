"""What routers and workers say to each other about users' programs.

Covers starting one, what it says, what it is told, and its end. Does not cover what a program's process
and its host say to each other (`pie.wire.programs`).
"""

from __future__ import annotations

import enum

import msgspec

from pie.page.events import Epoch


class StartProgram(msgspec.Struct, frozen=True, tag="start_program"):
    """Run a program. One frame: its text, UTF-8.

    Answered by `ProgramEvents` until one has an end, or by `Refused`. A `Cancel` of this id ends it.
    """

    request_id: str
    epoch: Epoch
    name: str
    """What its lines are called in tracebacks."""
    arguments: dict[str, str]
    """As text, by the parameters' names."""
    entry: str = "main"
    """The function to call."""
    salt: str | None = None
    tenant_tag: str = ""
    session_tag: str = ""


class ProgramEventKind(enum.StrEnum):
    """Where a text of a program comes from."""

    SAID = "said"
    """A message for the client, whole."""
    PRINTED = "printed"
    """A piece of what it printed."""


class ProgramEvent(msgspec.Struct, frozen=True, array_like=True):
    """A text of a program."""

    kind: ProgramEventKind
    text: str


class ProgramEnd(msgspec.Struct, frozen=True, array_like=True):
    """How a program ended."""

    reason: str
    """`finished`, or why it did not."""
    result: str = ""
    """What its function returned, as text."""
    error: str = ""
    """What went wrong: a traceback where it raised, else a sentence."""


class ProgramEvents(msgspec.Struct, frozen=True, tag="program_events"):
    """More of a program; one without events says that it still runs, the first that it was started."""

    request_id: str
    events: tuple[ProgramEvent, ...] = ()
    end: ProgramEnd | None = None


class TellProgram(msgspec.Struct, frozen=True, tag="tell_program"):
    """A message of a program's client. Answered by `ProgramTold`, or by `Refused`."""

    request_id: str
    epoch: Epoch
    program: str
    """Request id of its `StartProgram`."""
    text: str | None
    """None for the last."""


class ProgramTold(msgspec.Struct, frozen=True, tag="program_told"):
    """The message waits for its program."""

    request_id: str

"""What the step thread is told about programs, and what it answers them.

Does not cover messages on the pipe (`pie.wire.programs`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pie.wire.frames import Buffer
from pie.wire.programs import CallFailed, Drawn, EngineCall, PassDone, SetState
from pie.worker.grammar import Constraint

EngineAnswer = SetState | PassDone | Drawn | CallFailed


@dataclass(frozen=True, slots=True)
class ProgramBegan:
    """A program may make calls from now on."""

    program: str
    salt: str | None = None
    tenant_tag: str = ""
    session_tag: str = ""


@dataclass(frozen=True, slots=True)
class ProgramCall:
    """A program's call, in the order in which it made them."""

    program: str
    call: EngineCall
    frames: Sequence[bytes]
    constraint: Constraint | None = None
    """What a `GenerateTokens` must match."""


@dataclass(frozen=True, slots=True)
class ProgramEnded:
    """A program is gone: whatever it has is let go."""

    program: str


ProgramCommand = ProgramBegan | ProgramCall | ProgramEnded


@dataclass(frozen=True, slots=True)
class Carried:
    """A call that is not answered was carried out: for the host alone."""

    call: int


@dataclass(frozen=True, slots=True)
class ProgramAnswer:
    """What the engine says to a program, or to its host."""

    program: str
    message: EngineAnswer | Carried
    frames: Sequence[Buffer] = ()

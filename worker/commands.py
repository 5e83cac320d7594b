"""What the step thread is told, and what it answers.

Commands come through an inbox from the event loop and from background copies; a `StepReport`
goes back after each step. Does not cover the wire's messages (`pie.wire.messages`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from pie.wire.messages import Generate, Load, Refused, TokenDelta
from pie.worker.grammar import Constraint
from pie.worker.load_choice import Loaded
from pie.worker.loadable import Loadable
from pie.worker.programs.commands import ProgramAnswer, ProgramCommand
from pie.worker.stores import PageToStore


@dataclass(frozen=True, slots=True)
class Submit:
    """Carry out a request, which has been validated."""

    owner: bytes
    """Peer id of the router that asked."""
    request: Generate
    tokens: array[int]
    constraint: Constraint | None = None
    """What the answer must match, at its beginning."""


@dataclass(frozen=True, slots=True)
class CancelOne:
    """Give one request up."""

    owner: bytes
    request_id: str


@dataclass(frozen=True, slots=True)
class CancelAll:
    """Give up all requests of a router that is gone, or of all routers where None."""

    owner: bytes | None


@dataclass(frozen=True, slots=True)
class LoadEnded:
    """A load is over, well or badly; nothing writes the sequence's pages any more."""

    sequence: Loadable
    pages: int
    """The leading pages that came."""
    seconds: float
    has_state: bool = False
    """Whether the recurrent state after the last of them came too."""
    sources: tuple[Loaded, ...] = ()
    """Where from, in the order of the pages; those that were not reached are left out."""
    overran: bool = False
    """Whether it was given up because its time was over."""


@dataclass(frozen=True, slots=True)
class StoreEnded:
    """The batch of stores under way is over; nothing reads its pages any more."""

    stored: int
    """Pages that the pool holds now."""
    there: int
    """Pages that are where they were to go: in the pool, or in lower tiers where there is none."""
    again: tuple[PageToStore, ...] = ()
    """Pages that the pool did not take in time, or that another writer has promised to it."""


@dataclass(frozen=True, slots=True)
class Between:
    """Do something short between two steps."""

    work: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread."""


Command = Submit | CancelOne | CancelAll | LoadEnded | StoreEnded | ProgramCommand | Between | Stop


@dataclass(slots=True)
class StepReport:
    """What one step, or the commands before it, led to."""

    load: Load
    submitted: int = 0
    """Requests that had been submitted, of all time."""
    deltas: dict[bytes, list[TokenDelta]] = field(default_factory=dict)
    """By router."""
    refused: list[tuple[bytes, Refused]] = field(default_factory=list)
    programs: list[ProgramAnswer] = field(default_factory=list)
    idle: bool = False
    """Whether nothing is left to do."""

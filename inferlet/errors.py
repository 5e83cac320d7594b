"""What can go wrong for a program.

    InferletError
    ├── BadCallError           the call cannot be meant: wrong shapes, unknown tokens
    ├── NeverWrittenError      it names a slot that was never written
    ├── DroppedSlotError       it reads a slot that was dropped
    ├── FrozenPageError        it writes a slot in a frozen page
    ├── NothingAttendedError   a token would attend to nothing
    ├── RecurrentError         it asks of recurrent layers what only slots have
    ├── ContextLengthError     it does not fit into the model's context
    ├── OutOfPagesError        programs hold all the pages that they may
    ├── NotAllowedError        the host does not do this for programs
    ├── HttpFailedError        a server did not answer, or too slowly, or too much
    ├── ToolFailedError        a tool raised, or took too long
    ├── PassFailedError        the model failed
    ├── HostGoneError          the worker is gone
    ├── NotRunError            a client's: the program could not be run
    └── EndedError             a client's: the program did not end well

Where one slot is at fault, `slot` names it. A call that fails has changed nothing.
"""

from __future__ import annotations

import inspect

from pie.wire.programs import CallFailed, Trouble


class InferletError(Exception):
    """Anything that went wrong for a program."""

    def __init__(self, message: str, slot: int | None = None) -> None:
        super().__init__(message, slot)
        self.message = message
        self.slot = slot

    def __str__(self) -> str:
        return self.message


class BadCallError(InferletError):
    """The call cannot be meant."""


class NeverWrittenError(InferletError):
    """It names a slot that was never written."""


class DroppedSlotError(InferletError):
    """It reads a slot that was dropped."""


class FrozenPageError(InferletError):
    """It writes a slot in a frozen page."""


class NothingAttendedError(InferletError):
    """A token would attend to nothing."""


class RecurrentError(InferletError):
    """It asks of recurrent layers what only slots have."""


class ContextLengthError(InferletError):
    """It does not fit into the model's context."""


class OutOfPagesError(InferletError):
    """Programs hold all the pages that they may."""


class NotAllowedError(InferletError):
    """The host does not do this for programs."""


class HttpFailedError(InferletError):
    """A server did not answer, or too slowly, or too much."""


class ToolFailedError(InferletError):
    """A tool raised, or took too long."""


class PassFailedError(InferletError):
    """The model failed."""


class HostGoneError(InferletError):
    """The worker is gone, and with it all that this program had there."""


class NotRunError(InferletError):
    """A cluster did not run the program, or was lost while it ran."""


class EndedError(InferletError):
    """A program did not end well.

    Attributes:
        reason: Why, in a word: `raised`, `cancelled`, `too_long`, …
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.args = (message, reason)
        self.reason = reason


_ERRORS: dict[Trouble, type[InferletError]] = {
    Trouble.BAD_CALL: BadCallError,
    Trouble.NEVER_WRITTEN: NeverWrittenError,
    Trouble.DROPPED: DroppedSlotError,
    Trouble.FROZEN_PAGE: FrozenPageError,
    Trouble.NOTHING_ATTENDED: NothingAttendedError,
    Trouble.RECURRENT: RecurrentError,
    Trouble.CONTEXT_LENGTH: ContextLengthError,
    Trouble.OUT_OF_PAGES: OutOfPagesError,
    Trouble.NOT_ALLOWED: NotAllowedError,
    Trouble.FAILED: PassFailedError,
    Trouble.HTTP_FAILED: HttpFailedError,
    Trouble.TOOL_FAILED: ToolFailedError,
}


def type_told(value: object) -> str:
    """Return how an error names the type of a value that does not fit, and what may be missing around it."""
    name = type(value).__name__
    return f"{name}: is `await` missing?" if inspect.isawaitable(value) else name


def error_of(failed: CallFailed) -> InferletError:
    """Return the error that a host told of."""
    return _ERRORS[failed.trouble](failed.message, failed.slot)

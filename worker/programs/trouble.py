"""What is wrong with a program's call, as the program is told.

Does not cover what goes wrong with a program as a whole (`pie.worker.programs.process`).
"""

from __future__ import annotations

from pie.wire.programs import CallFailed, Trouble


def recurrent(why: str) -> CallError:
    """Return the error of what cannot be done to recurrent layers."""
    return CallError(
        Trouble.RECURRENT,
        f"this model has recurrent layers, which have no slots: their state holds all tokens in one: {why}",
    )


def lost_state() -> CallError:
    """Return the error of what would go on from a recurrent state that there is no more."""
    return CallError(
        Trouble.FAILED,
        "the recurrent state of this working set was lost with a pass that failed: close it, and go on from "
        "a fork that was made before, or anew",
    )


class CallError(Exception):
    """A call that is not carried out; nothing was changed by it."""

    def __init__(self, trouble: Trouble, message: str, slot: int | None = None) -> None:
        super().__init__(trouble, message, slot)
        self.trouble = trouble
        self.message = message
        self.slot = slot

    def __str__(self) -> str:
        return self.message

    def answer(self, call: int) -> CallFailed:
        """Return what tells the program."""
        return CallFailed(call, self.trouble, self.message, self.slot)

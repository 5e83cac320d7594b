"""Leaving alone for a while what does not answer.

Covers when loads from one place are tried again after one in whose time the place brought nothing
to anybody, so that a place that hangs costs one request its time and not each. Does not cover what
a load is.
"""

from __future__ import annotations

import logging
import time

log = logging.getLogger("pie.worker.stalls")

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
"""How long nothing is tried after a stall; doubled each time."""


class Stalls:
    """The pauses of one place, in seconds of the monotonic clock. `answered` may come from any thread."""

    def __init__(self, name: str) -> None:
        """Begin without a pause; log lines call the place `name`."""
        self.until_s = 0.0
        self.next_s = _FIRST_PAUSE_S
        self.answered_s = 0.0
        """When it last brought something to anybody, or said that it has it not."""
        self._name = name

    @property
    def is_paused(self) -> bool:
        """Whether nothing should be tried now."""
        return time.monotonic() < self.until_s

    def answered(self) -> None:
        """Learn that the place does what it is asked, in time."""
        self.answered_s = time.monotonic()
        self.next_s = _FIRST_PAUSE_S

    def gave_up(self, asked_s: float) -> None:
        """Learn that somebody who began to ask at `asked_s` got nothing in all the time there was.

        Those who lose beside each other are one stall, and where others got something it is none.
        """
        if self.is_paused or self.answered_s > asked_s:
            return
        log.warning("the %s does not answer; no load is tried for %g s", self._name, self.next_s)
        self.until_s = time.monotonic() + self.next_s
        self.next_s = min(2 * self.next_s, _LONGEST_PAUSE_S)

"""When cluster policies are asked next: every second, and ever more seldom where nothing happens.

Covers the times between rounds, so that a night without requests is passed over quickly. Does not cover a round
(`pie.simulator.conductor`).
"""

from __future__ import annotations

import math

EVERY_S = 1.0
QUIET_S = 120.0
"""With no request and nothing changed for less, a round comes every second: what built-in policies wait for
with their defaults, such as copies that cool for 30 s each, one after the other, is shorter."""
EMPTY_S = 3600.0
"""The same with no request, whatever changes: a policy may order for ever."""
_QUIET_PARTS = 16
_EMPTY_PARTS = 128
"""Then the next round comes after that part of the time that it has been so, and no time is a long one."""


class Rounds:
    """The times of one simulation's rounds, which are whole seconds."""

    def __init__(self) -> None:
        self._empty_since_s = 0.0
        self._quiet_since_s = 0.0

    def next_s(self, now_s: float, *, is_busy: bool, changed: bool, event_s: float) -> float:
        """Return when the round after the one of now is due.

        Args:
            now_s: Now.
            is_busy: Whether any request waits or runs, or a worker is about to leave.
            changed: Whether anything has changed since the last round, or is about to.
            event_s: When the next request or a place's leaving comes; infinite where none does. A round comes
                in the second before it, so that policies have said all that they have to say.
        """
        if is_busy:
            self._empty_since_s = now_s
        if is_busy or changed:
            self._quiet_since_s = now_s
        quiet_s, empty_s = now_s - self._quiet_since_s, now_s - self._empty_since_s
        wait_s = EVERY_S
        if quiet_s >= QUIET_S:
            wait_s = max(wait_s, quiet_s // _QUIET_PARTS)
        if empty_s >= EMPTY_S:
            wait_s = max(wait_s, empty_s // _EMPTY_PARTS)
        if math.isfinite(event_s):
            wait_s = min(wait_s, math.ceil(event_s) - 1 - now_s)
        return now_s + max(EVERY_S, wait_s)

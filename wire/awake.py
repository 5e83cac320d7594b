"""Time in which this process ran.

Covers telling the silence of another from a standstill of one's own: a process that was stopped, starved or
held up heard nobody, and nobody is to blame. Does not cover who is heard (`pie.wire.link`, `pie.wire.server`).
"""

from __future__ import annotations


class Awake:
    """A clock that is told the time at every beat, and counts what is late in them hardly at all."""

    def __init__(self, beat_s: float, now_s: float) -> None:
        self.now_s = 0.0
        """Seconds that this process has run, as of the last beat."""
        self._most_s = 2 * beat_s
        self._told_s = now_s

    def beat(self, now_s: float) -> float:
        """Go on to `now_s`, two beats at most; return how long this process has run."""
        self.now_s += min(now_s - self._told_s, self._most_s)
        self._told_s = now_s
        return self.now_s

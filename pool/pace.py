"""How fast something may go.

Covers a budget of bytes a second, as a bucket that fills and is emptied. Pure; time comes in. Does not
cover waiting.
"""

from __future__ import annotations

_BURST_S = 0.25


class Pace:
    """Says how long to wait before the next bytes, so that a rate is kept to."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """Begin with nothing used; 0 bytes a second is no limit."""
        self._bytes_per_s = bytes_per_s
        self._free_s = now_s

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Take `size_bytes` and return how long to wait before using them.

        What was not used a moment ago may be made up for, up to a quarter of a second's worth.
        """
        if not self._bytes_per_s:
            return 0.0
        self._free_s = max(self._free_s, now_s - _BURST_S)
        wait_s = max(0.0, self._free_s - now_s)
        self._free_s += size_bytes / self._bytes_per_s
        return wait_s

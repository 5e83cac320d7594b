"""How long loads from one tier take, learned from the last few: a fixed part, and one for each token.

Covers a line through what was seen that no single load can bend. Does not cover what is decided by
it (`pie.worker.load_choice`). Pure.

Where the line cannot be told yet, loads count as fast. To try one that is slow costs no more than
computing would have taken; one that is not tried teaches nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median_low

_KEPT = 6
"""So few loads are remembered that a tier's change shows after three."""
_APART = 2
"""Sizes whose larger one is less than so many times the smaller say nothing of the time for a token."""


class LoadTimes:
    """The last loads from one tier, and the line through them.

    The line is Siegel's repeated median (1982), with the lesser of two middle values everywhere: one
    load that was slow for other reasons never makes any load look slower than the others say.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=_KEPT)
        self._fixed_s = 0.0
        self._token_s: float | None = None
        """Seconds for a token beyond the fixed part; None where sizes are too much alike to tell."""
        self._whole_token_s = 0.0
        """Seconds for a token, the fixed part shared out."""

    @property
    def is_known(self) -> bool:
        """Whether enough was seen to say anything: one load may have been slow by chance."""
        return len(self._seen) > 1

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of a load like the last ones, its fixed part included; 0 until known."""
        return 1 / self._whole_token_s if self._whole_token_s else 0.0

    def seconds(self, tokens: int) -> float:
        """Return how long a load of so many tokens takes; 0 until known, and for none."""
        if not tokens:
            return 0.0
        if self._token_s is None:
            return min(self._fixed_s, self._whole_token_s * tokens)
        return self._fixed_s + self._token_s * tokens

    def longest_s(self, tokens: int) -> float:
        """Return how long it may take if what is not known of the line is at its worst."""
        line_s = self._fixed_s + (self._token_s or 0.0) * tokens
        return max(line_s, self._whole_token_s * tokens)

    def saw(self, tokens: int, seconds: float) -> None:
        """Learn that a load of `tokens` took `seconds`; nothing is learned from none or no time."""
        if tokens <= 0 or seconds <= 0:
            return
        self._seen.append((tokens, seconds))
        if not self.is_known:
            return
        self._whole_token_s = median_low(s / n for n, s in self._seen)
        self._token_s = _slope(self._seen)
        slope = self._token_s or 0.0
        self._fixed_s = median_low(s - slope * n for n, s in self._seen)
        if self._fixed_s < 0:
            self._fixed_s, self._token_s = 0.0, self._whole_token_s


def _slope(seen: Iterable[tuple[int, float]]) -> float | None:
    """Return the repeated median of the slopes between loads, 0 at least; None where there are too few.

    Each needs two others of another size, and two such loads are needed: else a single one decided.
    """
    points = list(seen)
    slopes = [
        [(s - t) / (n - m) for m, t in points if max(n, m) >= _APART * min(n, m)] for n, s in points
    ]
    medians = [median_low(some) for some in slopes if len(some) > 1]
    return max(0.0, median_low(medians)) if len(medians) > 1 else None

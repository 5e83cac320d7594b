"""A retention policy that scores pages: what was used often stays as if it had been used later."""

from __future__ import annotations

import math

from pie.policies.retention import PageView
from pie.policies.scored import PageUse, ScoredRetention
from pie.policies.units import Positive


class UsedOften(ScoredRetention):
    """The page unused for longest leaves first; each doubling of its uses counts as some time more.

    Args:
        doubling_s: That time, in seconds.
    """

    def __init__(self, doubling_s: Positive = 300.0) -> None:
        self._doubling_s = doubling_s

    def score(self, page: PageView, use: PageUse, now_s: float) -> float:
        """Return when a page that was never used would have come to be worth as much."""
        return use.used_s + self._doubling_s * math.log2(1 + use.uses)

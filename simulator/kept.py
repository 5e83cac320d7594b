"""How long pages are kept.

Covers one tier of one place.
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.page.events import PlaceId, Tier


@dataclass(slots=True)
class Kept:
    """How many pages a place has in a tier, over time."""

    place: PlaceId
    tier: Tier
    page_seconds: float = 0.0
    pages: int = 0
    since_s: float = 0.0

    def change(self, pages: int, now_s: float) -> None:
        """Count what was there until now; from now on there are so many more."""
        self.page_seconds += self.pages * (now_s - self.since_s)
        self.pages += pages
        self.since_s = now_s

"""A retention policy: the page stored last leaves first, so that what was there early stays."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Annotated

from pydantic import Field

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.retention import PageView


class NewestFirst:
    """The page stored last leaves first.

    Args:
        keep_pages: So many pages, the earliest, are never proposed.
    """

    def __init__(self, keep_pages: Annotated[int, Field(ge=0)] = 0) -> None:
        self._keep_pages = keep_pages
        self._held: dict[tuple[PageKey, Part], None] = {}

    def stored(self, page: PageView, now_s: float) -> None:
        """Remember a page, behind all others."""
        self._held[page.key, page.part] = None

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Uses do not matter here."""

    def removed(self, key: PageKey, part: Part) -> None:
        """Forget a page."""
        self._held.pop((key, part), None)

    def victims(self, bytes_needed: int, now_s: float) -> Iterator[tuple[PageKey, Part]]:
        """Propose pages, the latest in front."""
        most = max(0, len(self._held) - self._keep_pages)
        return islice(reversed(self._held), most)

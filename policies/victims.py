"""One answer of the retention manager in the making.

Covers which proposals are taken, refused and put off. Does not cover who proposes
(`pie.policies.manager`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from pie.page.events import Part
from pie.page.key import PageKey

HeldPage = tuple[PageKey, Part]
"""A part of a page, as managers and policies name it."""


@dataclass(slots=True)
class Holdings:
    """The pages of a tier: their sizes, the pages before them, and how often they are pinned."""

    sizes: dict[HeldPage, int] = field(default_factory=dict)
    parents: dict[HeldPage, HeldPage] = field(default_factory=dict)
    """For every held page the one before it, held or not."""
    pins: dict[HeldPage, int] = field(default_factory=dict)
    """Only pages that have a pin."""


@dataclass(slots=True)
class ManagerCounts:
    """What the manager has seen of its policy, since its start."""

    victims: int = 0
    """Pages that were given out as victims."""
    refused_pinned: int = 0
    """Proposals refused because the page is pinned."""
    refused_unknown: int = 0
    """Proposals refused because the page is not held, was proposed before, or is no page."""
    failures: int = 0
    """Calls in which the policy raised."""
    fallbacks: int = 0
    """Answers that `lru` completed, because the policy raised or proposed too little."""


class VictimChoice:
    """Takes proposals until they free enough."""

    def __init__(self, held: Holdings, counts: ManagerCounts, bytes_needed: int) -> None:
        self._held = held
        self._counts = counts
        self._seen: set[HeldPage] = set()
        self._before_pinned: set[HeldPage] = set()
        self._deferred: list[HeldPage] = []
        self._last = False
        self.missing_bytes = bytes_needed
        self.pages: list[HeldPage] = []

    @property
    def unseen(self) -> bool:
        """Whether there are unpinned pages that nobody has proposed yet."""
        pins, seen = self._held.pins, self._seen
        return any(page not in seen and page not in pins for page in self._held.sizes)

    def seen(self, page: HeldPage) -> bool:
        """Whether a page was proposed already."""
        return page in self._seen

    def consider(self, proposals: Iterable[object]) -> None:
        """Take proposals in order until there is enough."""
        for proposal in proposals:
            self._consider(proposal)
            if self.missing_bytes <= 0:
                return

    def consider_last(self) -> None:
        """Take what was put off, and then whatever is held."""
        self._last = True
        self._seen.difference_update(self._deferred)
        rest = (page for page in self._held.sizes if page not in self._seen)
        self.consider(chain(self._deferred, rest))

    def _consider(self, proposal: object) -> None:
        page = cast("HeldPage", proposal)
        try:
            size = self._held.sizes.get(page)
        except TypeError:  # unhashable
            size = None
        if size is None or page in self._seen:
            self._counts.refused_unknown += 1
            return
        page = (page[0], Part(page[1]))
        self._seen.add(page)
        if page in self._held.pins:
            self._counts.refused_pinned += 1
            self._put_off_before(page)
        elif page in self._before_pinned and not self._last:
            self._deferred.append(page)
        else:
            self.pages.append(page)
            self.missing_bytes -= size

    def _put_off_before(self, page: HeldPage) -> None:
        """Remember the held pages before a pinned one, as far back as they are not known."""
        parents = self._held.parents
        page = parents[page]
        while page in parents and page not in self._before_pinned:
            self._before_pinned.add(page)
            page = parents[page]

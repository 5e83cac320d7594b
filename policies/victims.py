"""One answer of the retention manager in the making.

Covers which proposals are taken, put off and refused, and what leaves where they are not enough. Does
not cover who proposes (`pie.policies.manager`).

No page leaves before the held pages that come after it, whoever proposes what: one that is proposed
before them is put off, and is taken with the last of them. That costs a look at each taken page's forerunner.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pie.page.events import Part
from pie.page.key import KEY_BYTES, PageKey
from pie.policies.page_rows import NO_ROW, PageRows, Row

HeldPage = tuple[PageKey, Part]
"""A part of a page, as managers and policies name it."""

_MOST_PART = max(Part)


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
    """Calls in which the policy raised, or had not answered in time."""
    fallbacks: int = 0
    """Answers that `lru` completed, because the policy failed or proposed too little."""
    failures_before: int = 0
    """Of failures those of policies that are in force no more; so are the next ones."""
    fallbacks_before: int = 0
    unknown_before: int = 0

    def replaced(self) -> None:
        """Learn that another policy is in force."""
        self.failures_before, self.fallbacks_before = self.failures, self.fallbacks
        self.unknown_before = self.refused_unknown

    def failing(self) -> dict[str, int]:
        """Return how often the policy in force failed, was helped out, and proposed what is not there."""
        return {
            "failures": self.failures - self.failures_before,
            "fallbacks": self.fallbacks - self.fallbacks_before,
            "unknown": self.refused_unknown - self.unknown_before,
        }

    def refused(self) -> dict[str, int]:
        """Return how many proposals were refused, by reason."""
        return {"pinned": self.refused_pinned, "unknown": self.refused_unknown}


def counted_together(counts: Iterable[ManagerCounts]) -> ManagerCounts:
    """Return the sums of what several managers have seen."""
    sums = ManagerCounts()
    for one in counts:
        for name in ManagerCounts.__slots__:
            setattr(sums, name, getattr(sums, name) + getattr(one, name))
    return sums


class VictimChoice:
    """Takes proposals until they free enough."""

    def __init__(
        self,
        rows: PageRows,
        counts: ManagerCounts,
        bytes_needed: int,
        is_kept: Callable[[Row], bool],
    ) -> None:
        self._rows = rows
        self._counts = counts
        self._is_kept = is_kept
        self._seen: set[Row] = set()
        self._before_policy: set[Row] = set()
        """Taken before a user's policy was asked, which cannot know it."""
        self._before_pinned: set[Row] = set()
        self._deferred: list[Row] = []
        self._gone: dict[Row, int] = {}
        """How many of the pages that come right after one have been taken."""
        self._early: set[Row] = set()
        """Proposed before pages that come after them."""
        self.missing_bytes = bytes_needed
        self.seen_bytes = 0
        """Bytes of the pages without a pin that a policy has proposed."""
        self.rows: list[Row] = []

    def consider(self, proposals: Iterable[object]) -> None:
        """Take a policy's proposals, pages as it names them, in order until there is enough."""
        for row in self.rows:
            self._count(self._rows.parent(row))
        for proposal in proposals:
            row = self._find(proposal)
            if row in self._before_policy:
                continue
            if row < 0 or row in self._seen:
                self._counts.refused_unknown += 1
            else:
                self._consider(row)
                if self.missing_bytes <= 0:
                    return

    def consider_rows(self, proposals: Iterator[Row]) -> None:
        """Take rows of pages that can leave, in order until there is enough; those seen are passed."""
        sizes, seen, taken = self._rows.sizes, self._seen, self.rows
        missing = self.missing_bytes
        if not seen:
            for row in proposals:
                taken.append(row)
                missing -= sizes[row]
                if missing <= 0:
                    break
            self.seen_bytes += self.missing_bytes - missing
            self.missing_bytes = missing
            seen.update(taken)
            self._before_policy.update(taken)
            return
        for row in proposals:
            if row not in seen:
                self._consider(row)
                if self.missing_bytes <= 0:
                    return

    def consider_last(self) -> None:
        """Take what was put off, and then whatever is not pinned, children before parents."""
        taken, rows = set(self.rows), self._rows
        left = {row: 0 for row in rows if row not in taken and not rows.pins[row]}
        for row in left:
            parent = rows.parent(row)
            if parent in left:
                left[parent] += 1
        first = {row: place for place, row in enumerate(self._deferred)}
        bare = [(first.get(row, len(left)), row) for row, children in left.items() if not children]
        heapq.heapify(bare)
        while self.missing_bytes > 0 and left:
            # A page can be its own forerunner in what a broken caller tells: then any one is taken.
            row = heapq.heappop(bare)[1] if bare else next(iter(left))
            if left.pop(row, None) is None:
                continue
            self.rows.append(row)
            self.missing_bytes -= rows.sizes[row]
            parent = rows.parent(row)
            if parent in left:
                left[parent] -= 1
                if not left[parent]:
                    heapq.heappush(bare, (first.get(parent, len(left)), parent))

    def _find(self, proposal: object) -> Row:
        # Of exactly these types: what inherits from them may have code that runs wherever it is looked at.
        if type(proposal) is not tuple or len(proposal) != 2:
            return NO_ROW
        key, part = proposal
        if type(key) is not bytes or len(key) > KEY_BYTES:
            return NO_ROW
        if type(part) is not Part and (type(part) is not int or not 0 <= part <= _MOST_PART):
            return NO_ROW
        return self._rows.find(key, part)

    def _consider(self, row: Row) -> None:
        self._seen.add(row)
        if self._rows.pins[row]:
            self._counts.refused_pinned += 1
            self._put_off_before(row)
            return
        self.seen_bytes += self._rows.sizes[row]
        if row in self._before_pinned or self._is_kept(row):
            self._deferred.append(row)
            self._put_off_before(row)
        elif self._gone.get(row, 0) < self._rows.children[row]:
            self._early.add(row)
        else:
            self._take(row)

    def _take(self, row: Row) -> None:
        """Take a page, and those before it that were proposed already and that nothing follows any more."""
        rows = self._rows
        while True:
            self.rows.append(row)
            self.missing_bytes -= rows.sizes[row]
            row = rows.parent(row)
            is_bare = self._count(row)
            if not is_bare or row not in self._early or self.missing_bytes <= 0:
                return
            self._early.discard(row)

    def _count(self, row: Row) -> bool:
        """Count that a page right after one was taken; say whether that was the last."""
        if row < 0:
            return False
        self._gone[row] = count = self._gone.get(row, 0) + 1
        return count == self._rows.children[row]

    def _put_off_before(self, row: Row) -> None:
        """Remember the held pages before one that stays, as far back as they are not known."""
        row = self._rows.parent(row)
        while row >= 0 and row not in self._before_pinned:
            self._before_pinned.add(row)
            row = self._rows.parent(row)

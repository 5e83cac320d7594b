"""The manager of one tier's pages: policies propose, it disposes.

Covers sizes, pins, and what becomes of a policy's proposals; pure, for one tier at one place. Does
not cover the order of victims (`pie.policies.lru` and other policies) or the pages' bytes
(`pie.pool`, `pie.worker`).

What a policy cannot break: a pinned page never leaves, a page that is not held is not counted, and
enough pages are found whenever enough are unpinned. A policy that raises or proposes too little is
logged, counted, and helped out by `lru`, which is told of every event for that purpose.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.lru import LruRetention
from pie.policies.retention import PageView, RetentionPolicy

log = logging.getLogger("pie.policies.manager")

_Page = tuple[PageKey, Part]

_NONSENSE_LIMIT = 1_000
"""Proposals beyond one for each held page, after which a policy is taken for an endless one."""


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


class RetentionManager:
    """Keeps sizes and pins of the pages in one tier, and asks a policy which should leave.

    Not thread-safe: the owner of the tier calls it under its own lock or from one thread. Calls
    about pages that are not held are harmless unless said otherwise.

    Args:
        policy: Who proposes victims.
        fallback: Who answers where `policy` fails; a fresh `LruRetention` where None.
        name: What log lines call this manager, such as `device` or `pool ram`.
    """

    def __init__(
        self,
        policy: RetentionPolicy | None = None,
        fallback: RetentionPolicy | None = None,
        *,
        name: str = "tier",
    ) -> None:
        self._policy: RetentionPolicy = policy if policy is not None else LruRetention()
        self._fallback: RetentionPolicy | None = fallback
        if fallback is None and type(self._policy) is not LruRetention:
            self._fallback = LruRetention()
        self._name = name
        self._bytes: dict[_Page, int] = {}
        self._parents: dict[_Page, _Page] = {}
        self._pins: dict[_Page, int] = {}
        self._used_bytes = 0
        self._pinned_bytes = 0
        self.counts = ManagerCounts()

    @property
    def used_bytes(self) -> int:
        """Bytes of all held pages."""
        return self._used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pages that are pinned now."""
        return self._pinned_bytes

    def __len__(self) -> int:
        return len(self._bytes)

    def __contains__(self, page: object) -> bool:
        return page in self._bytes

    def pins(self, key: PageKey, part: Part) -> int:
        """Return how many pins keep a page where it is; 0 where it is not held."""
        return self._pins.get((key, part), 0)

    def stored(self, page: PageView, now_s: float) -> None:
        """Learn that `page` is held from now on; one that is held already was just used."""
        at = (page.key, page.part)
        if at in self._bytes:
            self.hit(page.key, page.part, now_s)
            return
        self._bytes[at] = page.bytes
        self._parents[at] = (PageKey(page.parent), page.part)
        self._used_bytes += page.bytes
        if self._fallback is not None:
            self._fallback.stored(page, now_s)
        try:
            self._policy.stored(page, now_s)
        except Exception:  # noqa: BLE001
            self._failed("stored")

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a held page was used."""
        if (key, part) not in self._bytes:
            return
        if self._fallback is not None:
            self._fallback.hit(key, part, now_s)
        try:
            self._policy.hit(key, part, now_s)
        except Exception:  # noqa: BLE001
            self._failed("hit")

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; its pins, if it had any, are gone with it."""
        at = (key, part)
        size = self._bytes.pop(at, None)
        if size is None:
            return
        del self._parents[at]
        self._used_bytes -= size
        if self._pins.pop(at, 0):
            self._pinned_bytes -= size
        if self._fallback is not None:
            self._fallback.removed(key, part)
        try:
            self._policy.removed(key, part)
        except Exception:  # noqa: BLE001
            self._failed("removed")

    def pin(self, key: PageKey, part: Part) -> bool:
        """Keep a page where it is until `unpin`; pins count. Says whether it is held at all."""
        at = (key, part)
        if at not in self._bytes:
            return False
        pins = self._pins.get(at, 0)
        self._pins[at] = pins + 1
        if not pins:
            self._pinned_bytes += self._bytes[at]
        return True

    def unpin(self, key: PageKey, part: Part) -> None:
        """Take one pin from a page.

        Raises:
            ValueError: The page has no pin: pins and unpins of its owner do not match.
        """
        at = (key, part)
        pins = self._pins.get(at, 0)
        if not pins:
            raise ValueError(f"{self._name}: unpin of a page that has no pin: {key.hex()} {part!r}")
        if pins > 1:
            self._pins[at] = pins - 1
            return
        del self._pins[at]
        self._pinned_bytes -= self._bytes[at]

    def victims(self, bytes_needed: int, now_s: float) -> list[_Page]:
        """Return pages to remove, in that order, of `bytes_needed` bytes or more together.

        Fewer bytes come back only where all unpinned pages are not enough; then it is all of them.
        Nothing is removed: the caller removes them and calls `removed`. Pages before a pinned one
        in its sequence leave after all others, because it is of no use without them.
        """
        if bytes_needed <= 0:
            return []
        choice = _Choice(self, bytes_needed)
        # A policy may propose without end: one for each page and some nonsense is all it gets.
        limit = len(self._bytes) + _NONSENSE_LIMIT
        try:
            choice.consider(islice(self._policy.victims(bytes_needed, now_s), limit))
        except Exception:  # noqa: BLE001
            self._failed("victims")
        if choice.missing_bytes > 0 and self._fallback is not None:
            if choice.left:
                self.counts.fallbacks += 1
            choice.consider(self._fallback.victims(bytes_needed, now_s))
        if choice.missing_bytes > 0:
            choice.consider_last()
        self.counts.victims += len(choice.pages)
        return choice.pages

    def check(self) -> None:
        """Assert that the manager agrees with itself; slow, for tests."""
        assert self._used_bytes == sum(self._bytes.values())
        assert self._pinned_bytes == sum(self._bytes[page] for page in self._pins)
        assert self._parents.keys() == self._bytes.keys()
        assert all(pins > 0 for pins in self._pins.values())
        assert self._pins.keys() <= self._bytes.keys()

    def _failed(self, call: str) -> None:
        """Count and log a policy's exception; called where it is caught."""
        self.counts.failures += 1
        # The first one and then ever fewer: a policy that always raises must not fill the log.
        if self.counts.failures & (self.counts.failures - 1) == 0:
            log.exception(
                "%s: the retention policy %s raised in %s (%d failures so far); `lru` decides",
                self._name,
                type(self._policy).__name__,
                call,
                self.counts.failures,
            )


class _Choice:
    """One answer of `RetentionManager.victims` in the making."""

    def __init__(self, manager: RetentionManager, bytes_needed: int) -> None:
        self._manager = manager
        self._seen: set[_Page] = set()
        self._before_pinned: set[_Page] = set()
        self._deferred: list[_Page] = []
        self.missing_bytes = bytes_needed
        self.pages: list[_Page] = []

    @property
    def left(self) -> bool:
        """Whether there are pages that were neither proposed nor are pinned."""
        manager = self._manager
        return any(page not in self._seen and page not in manager._pins for page in manager._bytes)

    def consider(self, proposals: Iterable[object]) -> None:
        """Take proposals in order until there is enough."""
        for proposal in proposals:
            self._consider(proposal)
            if self.missing_bytes <= 0:
                return

    def consider_last(self) -> None:
        """Take what was put off, and then whatever is held."""
        self._before_pinned = set()
        deferred, self._deferred = self._deferred, []
        self._seen.difference_update(deferred)
        self.consider(chain(deferred, (p for p in self._manager._bytes if p not in self._seen)))

    def _consider(self, proposal: object) -> None:
        manager = self._manager
        try:
            size = manager._bytes.get(proposal)  # type: ignore[call-overload]
        except TypeError:  # unhashable
            size = None
        if size is None or proposal in self._seen:
            manager.counts.refused_unknown += 1
            return
        key, part = proposal  # type: ignore[misc]
        page = (key, Part(part))
        self._seen.add(page)
        if page in manager._pins:
            manager.counts.refused_pinned += 1
            ancestor = manager._parents[page]
            while ancestor in manager._parents and ancestor not in self._before_pinned:
                self._before_pinned.add(ancestor)
                ancestor = manager._parents[ancestor]
        elif page in self._before_pinned:
            self._deferred.append(page)
        else:
            self.pages.append(page)
            self.missing_bytes -= size

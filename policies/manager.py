"""The manager of one tier's pages: policies propose, it disposes.

Covers sizes, pins, and containing a policy; pure, for one tier at one place. Does not cover the
order of victims (`pie.policies.lru` and other policies), what becomes of a proposal
(`pie.policies.victims`) or the pages' bytes (`pie.pool`, `pie.worker`).

What a policy cannot break: a pinned page never leaves, a page that is not held is not counted, and
enough pages are found whenever enough are unpinned. A policy that raises, whatever it
is (`pie.policies.containing`), or proposes too little is logged, counted, and helped out by `lru`,
which is told of every event for that purpose.
"""

from __future__ import annotations

import logging
from itertools import islice

from pie.page.events import Part
from pie.page.key import PageKey
from pie.policies.containing import is_own
from pie.policies.lru import LruRetention
from pie.policies.retention import PageView, RetentionPolicy
from pie.policies.victims import HeldPage, Holdings, ManagerCounts, VictimChoice

log = logging.getLogger("pie.policies.manager")

_NONSENSE_LIMIT = 1_000
"""Proposals beyond one for each held page, after which a policy is taken for an endless one."""


class RetentionManager:
    """Keeps sizes and pins of the pages in one tier, and asks a policy which should leave.

    Not thread-safe: the owner of the tier calls it under its own lock or from one thread. Calls
    about pages that are not held are harmless unless said otherwise.

    Args:
        policy: Who proposes victims; `lru` where None.
        fallback: Who answers where `policy` fails; a fresh `lru` where None.
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
        self._held = Holdings()
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
        return len(self._held.sizes)

    def __contains__(self, page: object) -> bool:
        return page in self._held.sizes

    def pins(self, key: PageKey, part: Part) -> int:
        """Return how many pins keep a page where it is; 0 where it is not held."""
        return self._held.pins.get((key, part), 0)

    def stored(self, page: PageView, now_s: float) -> None:
        """Learn that `page` is held from now on; one that is held already was just used."""
        at = (page.key, page.part)
        if at in self._held.sizes:
            self.hit(page.key, page.part, now_s)
            return
        self._held.sizes[at] = page.bytes
        self._held.parents[at] = (PageKey(page.parent), page.part)
        self._used_bytes += page.bytes
        if self._fallback is not None:
            self._fallback.stored(page, now_s)
        try:
            self._policy.stored(page, now_s)
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed("stored", error)

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a held page was used."""
        if (key, part) not in self._held.sizes:
            return
        if self._fallback is not None:
            self._fallback.hit(key, part, now_s)
        try:
            self._policy.hit(key, part, now_s)
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed("hit", error)

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; its pins, if it had any, are gone with it."""
        at = (key, part)
        size = self._held.sizes.pop(at, None)
        if size is None:
            return
        del self._held.parents[at]
        self._used_bytes -= size
        if self._held.pins.pop(at, 0):
            self._pinned_bytes -= size
        if self._fallback is not None:
            self._fallback.removed(key, part)
        try:
            self._policy.removed(key, part)
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed("removed", error)

    def pin(self, key: PageKey, part: Part) -> bool:
        """Keep a page where it is until `unpin`; pins count. Says whether it is held at all."""
        at = (key, part)
        size = self._held.sizes.get(at)
        if size is None:
            return False
        pins = self._held.pins.get(at, 0)
        self._held.pins[at] = pins + 1
        if not pins:
            self._pinned_bytes += size
        return True

    def unpin(self, key: PageKey, part: Part) -> None:
        """Take one pin from a page.

        Raises:
            ValueError: The page has no pin: pins and unpins of its owner do not match.
        """
        at = (key, part)
        pins = self._held.pins.get(at, 0)
        if not pins:
            raise ValueError(f"{self._name}: unpin of a page that has no pin: {key.hex()} {part!r}")
        if pins > 1:
            self._held.pins[at] = pins - 1
            return
        del self._held.pins[at]
        self._pinned_bytes -= self._held.sizes[at]

    def victims(self, bytes_needed: int, now_s: float) -> list[HeldPage]:
        """Return pages to remove, in that order, of `bytes_needed` bytes or more together.

        Fewer bytes come back only where all unpinned pages are not enough; then it is all of them.
        Nothing is removed: the caller removes them and calls `removed`. Once a policy has proposed
        a pinned page, the pages before it in its sequence leave after all others, because it is of
        no use without them.
        """
        if bytes_needed <= 0:
            return []
        choice = VictimChoice(self._held, self.counts, bytes_needed)
        # A policy may propose without end: one for each page and some nonsense is all it gets.
        limit = len(self._held.sizes) + _NONSENSE_LIMIT
        try:
            choice.consider(islice(self._policy.victims(bytes_needed, now_s), limit))
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed("victims", error)
        if choice.missing_bytes > 0 and self._fallback is not None and choice.unseen:
            self.counts.fallbacks += 1
            unseen = (
                page
                for page in self._fallback.victims(bytes_needed, now_s)
                if not choice.seen(page)
            )
            choice.consider(unseen)
        if choice.missing_bytes > 0:
            choice.consider_last()
        self.counts.victims += len(choice.pages)
        return choice.pages

    def check(self) -> None:
        """Assert that the manager agrees with itself; slow, for tests."""
        held = self._held
        assert self._used_bytes == sum(held.sizes.values())
        assert self._pinned_bytes == sum(held.sizes[page] for page in held.pins)
        assert held.parents.keys() == held.sizes.keys()
        assert held.pins.keys() <= held.sizes.keys()
        assert all(pins > 0 for pins in held.pins.values())

    def _failed(self, call: str, error: BaseException) -> None:
        """Count and log what a policy raised."""
        self.counts.failures += 1
        # The first one and then ever fewer: a policy that always raises must not fill the log.
        if self.counts.failures & (self.counts.failures - 1) == 0:
            log.error(
                "%s: the retention policy %s raised in %s (%d failures so far); `lru` decides",
                self._name,
                type(self._policy).__name__,
                call,
                self.counts.failures,
                exc_info=error,
            )

"""What moves pages between the tiers of a cache, beside those who use them.

Covers one thread that copies pages up which were used below, moves victims down before the first
tier is full, copies pages to the last tier where that is wanted, and waits with them while that
takes none, and has it on disk how often pages were used. Does not cover which pages are victims (`pie.policies`) or how a page is copied
(`pie.pool.cache`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from itertools import islice

from pie.pool.cache import TieredCache
from pie.pool.tier import PageId

log = logging.getLogger("pie.pool.mover")

_FULL_ABOVE = 15 / 16
_FULL_TO = 7 / 8
"""Between these shares of its budget the first tier has room for new pages without a wait."""
_CLOSE_S = 10.0
"""How long closing waits for the page that is being copied."""
_MOST_WAITING = 1024
"""Pages to be copied up; more are not. They are used again if they are worth it."""
_MOST_NEW = 65_536
"""Pages to be copied down; more are not, before they have to leave or the node stops."""
_PAUSE_S = 1.0
"""How long a tier that took no page is left alone."""
_KEEP_USES_S = 5.0
"""The time between two writes of how often pages were used; what came since the last one a kill loses."""


class Mover:
    """Moves pages of one cache on a thread of its own, from `start` to `close`."""

    def __init__(
        self,
        cache: TieredCache,
        *,
        writes_through: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            cache: Whose pages move.
            writes_through: Copy each new page to the last tier soon, not only what rules want to
                outlive a restart.
            clock: Seconds, going forward only.
        """
        self.passed_over = 0
        """Pages that were not copied to the last tier, because too many waited."""
        self._cache = cache
        self._writes_through = writes_through
        self._clock = clock
        self._paused_until_s = 0.0
        self._keep_uses_at_s = 0.0
        self._wanted: dict[PageId, None] = {}
        self._new: dict[PageId, None] = {}
        self._kept: dict[PageId, int] = {}
        """Used above all tiers, and to outlive a restart."""
        self._should_look = False
        self._should_reconcile = False
        self._stop = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pie-pool-mover", daemon=True)

    def start(self) -> None:
        """Begin to move, first of all what rules want to be near and what an earlier start left to do."""
        self.preload()
        if self._writes_through:
            for page in self._cache.missing_below():
                self.write_through_soon(page, is_persistent=False)
        self._cache.move_with(self)
        self._thread.start()

    def preload(self) -> None:
        """Copy up what rules want to be near; what of it is in the first tier goes to the last."""
        for page in self._cache.to_preload():
            self.promote_soon(page)
        for page in self._cache.to_keep():
            self.write_through_soon(page, is_persistent=True)

    def promote_soon(self, page: PageId) -> None:
        """Copy a page that was used in a lower tier to the first one."""
        with self._wake:
            if len(self._wanted) < _MOST_WAITING:
                self._wanted[page] = None
                self._wake.notify()

    def look(self) -> None:
        """Look whether the first tier is too full."""
        if not self._cache.is_fuller_than(_FULL_ABOVE):
            return
        with self._wake:
            self._should_look = True
            self._wake.notify()

    def write_through_soon(self, page: PageId, *, is_persistent: bool) -> None:
        """Copy a page to the last tier, where that is wanted."""
        if not (self._writes_through or is_persistent):
            return
        with self._wake:
            if len(self._new) < _MOST_NEW:
                self._new[page] = None
                self._wake.notify()
            else:
                self.passed_over += 1

    def keep_soon(self, uses: Mapping[PageId, int]) -> None:
        """Count uses, above all tiers, of pages that are to outlive a restart, and copy them to the last tier.

        With how often each was used there, where that is why; 0 where it is not.
        """
        with self._wake:
            self._kept.update(islice(uses.items(), max(0, _MOST_NEW - len(self._kept))))
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """How many pages wait to be copied to the last tier."""
        return len(self._new)

    def reconcile_soon(self) -> None:
        """Compare records with tiers, because pages have come or gone there by themselves."""
        with self._wake:
            self._should_reconcile = True
            self._wake.notify()

    def close(self, limit_s: float = _CLOSE_S) -> bool:
        """End after the page that is being copied, and say whether that was within `limit_s`.

        Nothing was promised for the others. A thread that a disk holds for longer is left behind.
        """
        self._cache.move_with(None)
        with self._wake:
            self._stop = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(limit_s)
        if self._thread.is_alive():
            log.warning("the mover waits for a disk for more than %g s and is left behind", limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._has_work:
                    self._wake.wait(self._pause_s())
                if self._stop:
                    break
                should_look, self._should_look = self._should_look, False
                should_reconcile, self._should_reconcile = self._should_reconcile, False
                page = _first(self._wanted)
                new = None if self._is_paused else _first(self._new)
                kept, self._kept = self._kept, {}
            try:
                for one, uses in kept.items():
                    self._cache.count_use(one, uses)
                    self.write_through_soon(one, is_persistent=True)
                if should_reconcile:
                    self._cache.reconcile()
                if page is not None:
                    should_look |= self._cache.promote(page)
                if should_look:
                    self._cache.relieve(_FULL_ABOVE, _FULL_TO)
                if new is not None and self._cache.write_through(new):
                    self._wait_with(new)
                if self._should_keep_uses:
                    self._keep_uses()
            except Exception:
                # Moving is a help, and serving goes on without it.
                log.exception("a page could not be moved between tiers")
        self._keep_uses()

    def _keep_uses(self) -> None:
        self._keep_uses_at_s = self._clock() + _KEEP_USES_S
        try:
            self._cache.keep_uses()
        except Exception:
            log.exception("how often pages were used could not be kept")

    def _pause_s(self) -> float | None:
        """Return how long there is nothing to do unless somebody says so; None for ever."""
        until_s = [self._paused_until_s] if self._new else []
        if self._cache.has_new_uses:
            until_s.append(self._keep_uses_at_s)
        return min(until_s) - self._clock() if until_s else None

    @property
    def _should_keep_uses(self) -> bool:
        return self._cache.has_new_uses and self._clock() >= self._keep_uses_at_s

    @property
    def _has_work(self) -> bool:
        is_new = self._new and not self._is_paused
        return bool(
            self._wanted
            or is_new
            or self._kept
            or self._should_look
            or self._should_reconcile
            or self._should_keep_uses
            or self._stop
        )

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until_s

    def _wait_with(self, page: PageId) -> None:
        """Let a page that the last tier does not take now wait with the others."""
        with self._wake:
            self._new[page] = None
            self._paused_until_s = self._clock() + _PAUSE_S


def _first(waiting: dict[PageId, None]) -> PageId | None:
    """Take out what came first."""
    page = next(iter(waiting), None)
    if page is not None:
        del waiting[page]
    return page

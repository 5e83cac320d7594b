"""A store of pages below device memory, without the bytes.

Covers which pages a tier holds, by the real manager and a real policy, within its capacity. Does not
cover how long moving takes (`pie.simulator.cost_model`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pie.page.events import PageEntry, Part, Tier
from pie.page.key import PageKey, RootKey
from pie.policies.manager import RetentionManager
from pie.policies.retention import NO_ROOT, PageView
from pie.simulator.clock import Clock
from pie.worker.page_table import FrozenPage

OnChange = Callable[[Sequence[PageEntry], bool], None]
"""Told what is stored (true) or removed (false)."""


class MockTier:
    """Pages in one tier.

    Args:
        kind: What it is.
        pages: Its capacity.
        page_bytes: Size of a page.
        retention: Chooses victims.
        clock: The time.
        on_change: Told what comes and goes.
        model: The root of the model whose pages they are, for policies.
        page_tokens: Tokens in a page of that, for policies.
    """

    def __init__(
        self,
        kind: Tier,
        pages: int,
        *,
        page_bytes: int,
        retention: RetentionManager,
        clock: Clock,
        on_change: OnChange = lambda _entries, _stored: None,
        model: RootKey = NO_ROOT,
        page_tokens: int = 0,
    ) -> None:
        self.kind = kind
        self.total = pages
        self.stored = 0
        """Pages that were brought here."""
        self.evicted = 0
        self._page_bytes = page_bytes
        self._retention = retention
        self._clock = clock
        self._on_change = on_change
        self._model = model
        self._page_tokens = page_tokens
        self._held: dict[PageKey, FrozenPage] = {}

    def __len__(self) -> int:
        return len(self._held)

    def has(self, key: PageKey) -> bool:
        """Say whether a page is here."""
        return key in self._held

    def page(self, key: PageKey) -> FrozenPage | None:
        """Return what names a page that is here; None where it is not."""
        return self._held.get(key)

    def pages(self) -> list[FrozenPage]:
        """Return all pages that are here, in the order in which they came."""
        return list(self._held.values())

    def run(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages are here."""
        count = 0
        while count < len(keys) and keys[count] in self._held:
            count += 1
        return count

    def put(self, pages: Sequence[FrozenPage], *, may_evict: bool = True) -> None:
        """Bring pages here that are in order of their sequence; those that are here were just used.

        Others leave for them only where they may.
        """
        now_s = self._clock.now_s()
        new: list[FrozenPage] = []
        # From the end, so that a policy that goes by time gives up tails before what they need.
        for page in reversed(pages):
            if page.key in self._held:
                self._retention.hit(page.key, Part.FULL, now_s)
            elif (may_evict or len(self._held) < self.total) and self._make_room(now_s):
                self._store(page, now_s)
                new.append(page)
        # Where all of them have no room, the first ones left for the last ones.
        if stayed := [self._entry(page) for page in new if page.key in self._held]:
            self._on_change(stayed, True)

    def pin(self, keys: Sequence[PageKey]) -> None:
        """Keep pages, which are here, while they are being read; they were just used."""
        now_s = self._clock.now_s()
        for key in reversed(keys):
            self._retention.hit(key, Part.FULL, now_s)
            self._retention.pin(key, Part.FULL)

    def unpin(self, keys: Sequence[PageKey]) -> None:
        """End what `pin` began."""
        for key in keys:
            self._retention.unpin(key, Part.FULL)

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Let go of pages, unless somebody reads them."""
        gone = [
            key for key in keys if key in self._held and not self._retention.pins(key, Part.FULL)
        ]
        self._remove(gone)

    def check(self) -> None:
        """Raise `AssertionError` where the tier contradicts itself."""
        self._retention.check()
        assert len(self._held) == len(self._retention) <= self.total

    def _entry(self, page: FrozenPage) -> PageEntry:
        return PageEntry(
            page.key,
            page.parent,
            page.index,
            Part.FULL,
            self.kind,
            self._page_bytes,
            page.tenant_tag,
        )

    def _store(self, page: FrozenPage, now_s: float) -> None:
        self._held[page.key] = page
        self.stored += 1
        self._retention.stored(
            PageView(
                key=page.key,
                parent=page.parent,
                index=page.index,
                part=Part.FULL,
                tier=self.kind,
                bytes=self._page_bytes,
                tenant_tag=page.tenant_tag,
                session_tag=page.session_tag,
                model_root=self._model,
                page_tokens=self._page_tokens,
            ),
            now_s,
        )

    def _make_room(self, now_s: float) -> bool:
        """Say whether there is room for a page, letting one go if need be."""
        if len(self._held) < self.total:
            return True
        victims = self._retention.victims(self._page_bytes, now_s)
        self.evicted += len(victims)
        self._remove([key for key, _ in victims])
        return len(self._held) < self.total

    def _remove(self, keys: Sequence[PageKey]) -> None:
        gone = [self._entry(self._held.pop(key)) for key in keys]
        for key in keys:
            self._retention.removed(key, Part.FULL)
        if gone:
            self._on_change(gone, False)

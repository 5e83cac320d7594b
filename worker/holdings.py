"""What a worker holds, as the index is told.

Covers page events of device memory. Does not cover sending them (`pie.index.publisher`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from pie.index.contract import IndexWriter
from pie.page.events import PageEntry, Part, Tier
from pie.page.key import PageKey
from pie.page.layout import PageLayout
from pie.worker.page_table import Change, FrozenPage


class Holdings:
    """The frozen pages and snapshots of one worker's device memory. Thread-safe.

    Args:
        layout: Says which parts a page has.
    """

    def __init__(self, layout: PageLayout) -> None:
        self._layout = layout
        self._lock = threading.Lock()
        self._pages: dict[tuple[PageKey, bool], FrozenPage] = {}

    def apply(self, changes: Sequence[Change], writer: IndexWriter) -> None:
        """Take in what the page table did, and tell the index in the same order."""
        for stored, run in itertools.groupby(changes, lambda change: change.stored):
            batch = list(run)
            with self._lock:
                for change in batch:
                    if stored:
                        self._pages[change.page.key, change.is_state] = change.page
                    else:
                        del self._pages[change.page.key, change.is_state]
            entries = [
                entry for change in batch for entry in self._entries(change.page, change.is_state)
            ]
            if stored:
                writer.stored(entries)
            else:
                writer.removed(entries)

    def pages(self) -> list[FrozenPage]:
        """Return what names the pages that are held now, the latest last."""
        with self._lock:
            return list(self._pages.values())

    def snapshot(self) -> list[PageEntry]:
        """Return all that is held now."""
        with self._lock:
            pages = list(self._pages.items())
        return [entry for (_, is_state), page in pages for entry in self._entries(page, is_state)]

    def _entries(self, page: FrozenPage, is_state: bool) -> Iterable[PageEntry]:
        for part in (Part.STATE,) if is_state else self._layout.attention_parts:
            yield PageEntry(
                key=page.key,
                parent=page.parent,
                index=page.index,
                part=part,
                tier=Tier.DEVICE,
                bytes=self._layout.part_bytes(part),
                tenant_tag=page.tenant_tag,
            )

"""The index, as a cache sees it before and after a node has a place in it.

Covers passing changes on. Does not cover publishing (`pie.index.publisher`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.index.contract import IndexWriter
from pie.page.events import PageEntry


class IndexRelay:
    """An `IndexWriter` that passes changes on to another, once there is one.

    Changes before that are in the snapshot that the other one starts from.
    """

    def __init__(self) -> None:
        self._writer: IndexWriter | None = None

    def connect(self, writer: IndexWriter | None) -> None:
        """Pass changes on to `writer` from now on."""
        self._writer = writer

    def stored(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place holds these entries from now on."""
        if self._writer is not None:
            self._writer.stored(entries)

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place no longer holds these entries."""
        if self._writer is not None:
            self._writer.removed(entries)

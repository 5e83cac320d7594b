"""An index that remembers what a cache told it, and objects to what makes no sense."""

from collections.abc import Sequence

from pie.page.events import PageEntry


class IndexLog:
    def __init__(self) -> None:
        self.entries: set[PageEntry] = set()
        self.removals: list[PageEntry] = []

    def stored(self, entries: Sequence[PageEntry]) -> None:
        for entry in entries:
            assert entry not in self.entries, "stored twice"
            self.entries.add(entry)

    def removed(self, entries: Sequence[PageEntry]) -> None:
        for entry in entries:
            assert entry in self.entries, "removed without having been stored"
            self.entries.remove(entry)
            self.removals.append(entry)

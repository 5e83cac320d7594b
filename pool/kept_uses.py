"""How often pages were used that rules keep for their uses, remembered on disk beside the pages.

Covers which are remembered and the file's bytes. Does not cover what rules want (`pie.policies.rule_book`) or where
the file lies (`pie.pool.folder`).

Without it a page that was hot before a restart would be like any other afterwards, neither kept nor brought near. What
is damaged, or made under another secret, is as if nothing had been remembered: it decides about no page's content.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from pie.page.events import Part
from pie.page.header import checksum
from pie.page.key import PageKey
from pie.pool.tier import PageId

MOST = 16_384
"""Pages remembered at most, those used last: 574 KB."""

_MAGIC = b"PIEUSES1"
_RECORD = struct.Struct("<32sBH")
_CHECKSUM_BYTES = 16
MOST_BYTES = len(_MAGIC) + _CHECKSUM_BYTES + MOST * _RECORD.size
"""Of the file."""


@runtime_checkable
class KeepsUses(Protocol):
    """A tier that outlives its process, with room for a note beside its pages."""

    def keep_uses(self, uses: Mapping[PageId, int]) -> None:
        """Keep how often pages were used, in place of what was kept before. May wait for the disk."""

    def kept_uses(self) -> Mapping[PageId, int]:
        """Return what was kept last; nothing where that is damaged."""
        ...


class KeptUses:
    """What a cache remembers of uses. Thread-safe; only `keep` waits for the disk."""

    def __init__(self, keeper: KeepsUses | None) -> None:
        """Begin with nothing; None where nothing outlives the process."""
        self._keeper = keeper
        self._uses: dict[PageId, int] = {}
        self._is_new = False
        self._lock = threading.Lock()

    def load(self) -> None:
        """Take on what an earlier process left."""
        if self._keeper is not None:
            with self._lock:
                self._uses = dict(self._keeper.kept_uses())

    def of(self, page: PageId) -> int:
        """Return how often a page was used, when that was last noted."""
        return self._uses.get(page, 0)

    def pages(self) -> list[PageId]:
        """Return the pages that are remembered."""
        with self._lock:
            return list(self._uses)

    def note(self, page: PageId, uses: int) -> None:
        """Remember a page; where there are too many, the one noted longest ago is forgotten."""
        if self._keeper is None:
            return
        with self._lock:
            self._uses.pop(page, None)
            self._uses[page] = uses
            if len(self._uses) > MOST:
                del self._uses[next(iter(self._uses))]
            self._is_new = True

    @property
    def is_new(self) -> bool:
        """Whether there is something that the disk does not have."""
        return self._is_new

    def keep(self) -> None:
        """Have it on the disk."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
            uses = dict(self._uses) if is_new else {}
        if is_new and self._keeper is not None:
            self._keeper.keep_uses(uses)


def encoded(uses: Mapping[PageId, int], secret: bytes | None) -> bytes:
    """Return a file's bytes.

    Args:
        uses: 65,535 at most for each page.
        secret: The cluster's secret, where it has one.
    """
    body = b"".join(_RECORD.pack(page.key, page.part, count) for page, count in uses.items())
    return _MAGIC + checksum(_MAGIC + body, secret) + body


def decoded(data: bytes, secret: bytes | None) -> dict[PageId, int]:
    """Return what a file says; nothing where it is not one, is damaged or of another secret."""
    start = len(_MAGIC) + _CHECKSUM_BYTES
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(body) % _RECORD.size:
        return {}
    if data[len(_MAGIC) : start] != checksum(_MAGIC + body, secret):
        return {}
    try:
        return {
            PageId(PageKey(key), Part(part)): count
            for key, part, count in _RECORD.iter_unpack(body)
        }
    except ValueError:
        return {}  # A part that a later Pie knows.

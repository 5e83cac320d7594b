"""What the object tier knows of one page, and of the pack that it may lie in.

Covers the rows of its tables. Does not cover the tables (`pie.pool.object`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.page.errors import BadPageReason
from pie.page.format import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.space import Claim

MISSING = "missing"
"""The object is not there any more: somebody else has removed it."""


LOCKED = BadPageReason.LOCKED.value
"""Encrypted with a key that is not here: left where it is."""


@dataclass(slots=True)
class ObjectPack:
    """An object that holds many small pages. It never changes: it dies page by page, then goes."""

    name: str
    size: int
    live_bytes: int = 0
    live_pages: int = 0
    is_leaving: bool = False
    is_moving: bool = False
    scan: int = 0
    """Which listing was under way when it came; only a later one can tell that it is gone."""

    @property
    def is_half_dead(self) -> bool:
        """Whether moving what is alive gives back more than it takes."""
        return not self.is_leaving and 2 * self.live_bytes <= self.size

    def take(self, length: int) -> None:
        """Count a page in."""
        self.live_bytes += length
        self.live_pages += 1

    def free(self, length: int) -> None:
        """Count a page out."""
        self.live_bytes -= length
        self.live_pages -= 1


@dataclass(frozen=True, slots=True)
class ObjectHome:
    """Where in the bucket a page lies: in an object of its own, or in a slot of a pack."""

    length: int
    start: int = 0
    pack: ObjectPack | None = None


@dataclass(slots=True)
class ObjectEntry:
    """A page that is being written, can be read, or is on its way out."""

    header: PageHeader
    status: LookupStatus = LookupStatus.PENDING
    """`HIT` is readable; `MISS` is on its way out, and goes with its last pin."""
    home: ObjectHome | None = None
    room: memoryview | None = None
    """The payload, until it is in the bucket."""
    claim: Claim | None = None
    pins: int = 0
    is_completing: bool = False
    bad: str = ""
    """Why the page is on its way out, where it is bad."""
    scan: int = 0
    """Which listing was under way when it came; only a later one can tell that it is gone."""

    def check(self) -> None:
        """Assert that the fields agree."""
        assert self.pins >= 0
        assert (self.home is None) == (self.room is not None)
        if self.status is LookupStatus.PENDING:
            assert self.pins == 0
            assert self.home is None
        if self.home is not None:
            assert self.claim is None

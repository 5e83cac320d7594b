"""What the object tier knows of one page, and of the pack that it may lie in.

Covers the rows of its tables. Does not cover the tables (`pie.pool.object_table`,
`pie.pool.object_packs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.page.errors import BadPageReason
from pie.page.format import page_name
from pie.page.header import PageHeader
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
    """Gone, or about to go."""
    is_moving: bool = False
    has_spares: bool = False
    """Whether there are pages in it that others may read here, and that count in another object."""
    scan: int = 0
    """Which listing was under way when it came; only a later one can tell that it is gone."""

    @property
    def is_half_dead(self) -> bool:
        """Whether moving what is alive gives back more than it takes."""
        return not self.is_leaving and 2 * self.live_bytes <= self.size


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
    """Its checksum may be of other bits than those in the bucket, where two workers computed the page."""
    status: LookupStatus = LookupStatus.PENDING
    """`HIT` is readable; `MISS` is on its way out, and goes with its last pin."""
    home: ObjectHome | None = None
    copies: tuple[ObjectHome, ...] = ()
    """Where in other packs it lies too, of those that were seen: these do not count."""
    room: memoryview | None = None
    """The payload, until it is in the bucket."""
    claim: Claim | None = None
    pins: int = 0
    is_completing: bool = False
    has_left: bool = False
    """Whether it was removed here: where its pack is only being written, it has left that too."""
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

    @property
    def own_name(self) -> str:
        """The name that an object of this page alone has."""
        return page_name(self.header.model_root, self.header.key, self.header.part)

    def name_in(self, home: ObjectHome) -> str:
        """Return the name of the object that the page lies in."""
        return self.own_name if home.pack is None else home.pack.name

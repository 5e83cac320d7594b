"""What the disk tier knows of one page.

Covers the row of its table. Does not cover the table (`pie.pool.disk`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pie.page.errors import BadPageReason
from pie.page.header import PageHeader
from pie.page.lookup import LookupStatus
from pie.pool.folder import Home
from pie.pool.space import Claim

MISSING = "missing"
"""The page's file is not there any more: somebody else has removed it."""
UNREADABLE = "unreadable"
"""The disk returned an error."""

LOCKED = BadPageReason.LOCKED.value
"""Encrypted with a key that is not here: its bytes are good for whoever has the key."""

_REASONS = {reason.value: reason for reason in BadPageReason if reason.value != LOCKED}


@dataclass(slots=True)
class DiskEntry:
    """A page that is being written, can be read, or is on its way out."""

    header: PageHeader
    status: LookupStatus = LookupStatus.PENDING
    """`HIT` is readable; `MISS` is on its way out, and goes with its last pin."""
    home: Home | None = None
    room: memoryview | None = None
    claim: Claim | None = None
    pins: int = 0
    is_completing: bool = False
    stamp: int = 0
    """Smaller for a page that came earlier."""
    bad: str = ""
    """Why the page is on its way out, where it is bad: a `BadPageReason` or a name from above."""

    @property
    def is_readable(self) -> bool:
        """Whether the page may be lent."""
        return self.status is LookupStatus.HIT

    @property
    def rests(self) -> bool:
        """Whether nothing happens to the page."""
        return self.status is LookupStatus.HIT and not self.pins

    @property
    def is_locked(self) -> bool:
        """Whether the page lies there for somebody who has its key."""
        return self.bad == LOCKED

    @property
    def bad_reason(self) -> BadPageReason | None:
        """What is wrong with the page's bytes; None where they are good or not to be had."""
        return _REASONS.get(self.bad)

    def check(self) -> None:
        """Assert that the fields agree."""
        is_pending = self.status is LookupStatus.PENDING
        assert is_pending == (self.room is not None) == (self.claim is not None)
        assert is_pending == (self.home is None)
        assert self.pins == 0 or not is_pending
        assert self.pins >= 0

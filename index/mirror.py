"""The page index in memory. STUB: signatures are final, bodies follow."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from pie.index.contract import IndexMode, PlaceRecord
from pie.index.runs import MaskRun
from pie.page.events import Epoch, PageEvent, PartMask, PlaceId, Tier
from pie.page.key import PageKey


class Applied(enum.Enum):
    """What became of an event."""

    DONE = "done"
    OLD = "old"
    """Known already, or from an earlier start of the place: nothing changed."""
    GAP = "gap"
    """Events before it are missing: nothing changed, the place must be read anew."""
    UNKNOWN = "unknown"
    """The place is not up in this epoch: nothing changed."""


class Mirror:
    """Who holds which page, as far as known; an `IndexReader`. Not thread-safe, does no I/O."""

    mode: IndexMode
    """Set by whoever feeds the mirror; `OK` at first."""

    def __init__(self) -> None:
        raise NotImplementedError

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are up."""
        raise NotImplementedError

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, MaskRun]:
        """Return, for every place that holds `keys[0]`, the masks of its leading run.

        A run ends before the first key that the place does not hold in any part. A `MaskRun` is a
        sequence of masks; `MaskRun.segments` gives the same compressed, `[(mask, pages), ...]`,
        which is far cheaper to walk than one mask at a time.
        """
        raise NotImplementedError

    def place_up(self, record: PlaceRecord, *, seq: int = 0) -> bool:
        """Add an empty place, or replace the record of one that is up in the same epoch.

        A later epoch empties the place. Returns False, changing nothing, for an earlier one.
        """
        raise NotImplementedError

    def place_down(self, place: PlaceId, epoch: Epoch | None = None) -> bool:
        """Forget a place and all it holds, unless it is up in a later epoch than `epoch`."""
        raise NotImplementedError

    def apply(self, event: PageEvent) -> Applied:
        """Take in the next event of a place."""
        raise NotImplementedError

    def pages(self, place: PlaceId) -> Mapping[Tier, int]:
        """Return how many page parts a place holds in each tier."""
        raise NotImplementedError

    def masks(self, place: PlaceId) -> dict[PageKey, PartMask]:
        """Return all that a place holds; slow, for tools and tests."""
        raise NotImplementedError

    def tidy(self, steps: int = 2_000) -> bool:
        """Do a bounded part of the cleaning left over from places that went; say whether more is left."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert that the mirror agrees with itself; slow, for tests."""
        raise NotImplementedError


_ = Iterable

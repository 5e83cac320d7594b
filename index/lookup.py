"""Direct look-up in Redis, for tools. STUB: signatures are final, bodies follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pie.index.contract import IndexMode, PlaceRecord
from pie.index.settings import IndexSettings
from pie.page.events import PartMask, PlaceId, Tier
from pie.page.key import PageKey


class DirectLookup:
    """An `IndexReader` that asks Redis at every call; exact, blocking and slow: for tools.

    Raises `IndexUnavailableError` where Redis does not answer.
    """

    def __init__(self, url: str, *, settings: IndexSettings | None = None) -> None:
        raise NotImplementedError

    @property
    def mode(self) -> IndexMode:
        """`OK`, or `DEGRADED` where Redis does not answer."""
        raise NotImplementedError

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are alive."""
        raise NotImplementedError

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, Sequence[PartMask]]:
        """Return, for every place that holds `keys[0]`, the masks of its leading run."""
        raise NotImplementedError

    def pages(self, place: PlaceId) -> Mapping[Tier, int]:
        """Return how many page parts a place holds in each tier."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of connections."""
        raise NotImplementedError

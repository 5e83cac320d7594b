"""How a place says what it holds. STUB: signatures are final, bodies follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pie.index.contract import IndexMode, PlaceRecord
from pie.index.settings import IndexSettings
from pie.page.events import PageEntry


class Publisher:
    """Publishes one place in Redis; an `IndexWriter`.

    `stored` and `removed` may be called from any thread, return at once and never raise; call them
    *after* your own table has changed. `snapshot` is called from the event loop's thread, whenever
    the place has to be announced anew; it must be safe against your other threads and return all
    that the place holds now.

    Redis may be down at the start, go away and come back, or lose everything: the publisher keeps
    trying and announces the place anew.
    """

    def __init__(
        self,
        url: str,
        record: PlaceRecord,
        snapshot: Callable[[], Iterable[PageEntry]],
        *,
        settings: IndexSettings | None = None,
        on_mode: Callable[[IndexMode], None] | None = None,
        on_fenced: Callable[[], None] | None = None,
    ) -> None:
        raise NotImplementedError

    @property
    def mode(self) -> IndexMode:
        """`OK` when Redis has all that was published but what is on its way."""
        raise NotImplementedError

    @property
    def fenced(self) -> bool:
        """Whether a later start of this place has taken over; nothing is published any more."""
        raise NotImplementedError

    async def start(self) -> None:
        """Begin publishing; returns at once, whether or not Redis answers."""
        raise NotImplementedError

    async def flushed(self, timeout_s: float) -> bool:
        """Wait until Redis has all that was published before this call; False when time is up."""
        raise NotImplementedError

    async def close(self) -> None:
        """Send what is left, withdraw the place, and let go of connections; takes seconds at most."""
        raise NotImplementedError

    def stored(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place holds these entries from now on."""
        raise NotImplementedError

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place no longer holds these entries."""
        raise NotImplementedError

    def cleared(self) -> None:
        """Say that the place holds nothing any more."""
        raise NotImplementedError

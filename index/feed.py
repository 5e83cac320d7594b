"""How a mirror learns from Redis. STUB: signatures are final, bodies follow."""

from __future__ import annotations

from collections.abc import Callable

from pie.index.contract import IndexMode
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings


class MirrorFeed:
    """Keeps a mirror equal to what the places publish in Redis.

    Redis may be down at the start, go away and come back, or lose everything. `mirror.mode` says
    how it stands: `DEGRADED` while Redis cannot be reached (the mirror keeps what it knows),
    `RESYNCING` while places are read, else `OK`.

    Args:
        url: Redis.
        mirror: What to feed; nobody else may change it meanwhile. Read it from the same event loop.
        settings: Key prefix, intervals and limits.
        with_pages: False follows places only, for those who look for pool nodes and not for pages.
        on_mode: Called with every new mode.
    """

    def __init__(
        self,
        url: str,
        mirror: Mirror,
        *,
        settings: IndexSettings | None = None,
        with_pages: bool = True,
        on_mode: Callable[[IndexMode], None] | None = None,
    ) -> None:
        raise NotImplementedError

    async def start(self) -> None:
        """Begin; returns at once, whether or not Redis answers."""
        raise NotImplementedError

    async def ready(self, timeout_s: float) -> bool:
        """Wait until all places that are up have been read; False when time is up."""
        raise NotImplementedError

    async def close(self) -> None:
        """Stop; the mirror keeps what it knows, in mode `DEGRADED`."""
        raise NotImplementedError

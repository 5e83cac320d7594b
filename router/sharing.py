"""What one router shares with all others, put together.

Covers the connection, tenants' allowances, counts and the two shelves, and letting go of them. Does not cover what they
are for (`pie.router.quota`, `pie.router.responding`, `pie.router.explain`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from pie.index.allowance_redis import RedisAllowances
from pie.index.commons import Commons
from pie.index.settings import IndexSettings
from pie.index.shelf import MemoryShelf, Shelf, ShelfLimits
from pie.index.shelf_parted import PartedShelf
from pie.index.shelf_sealed import SealedShelf, sealed_name
from pie.index.tallies import Tallies
from pie.router.allowances import DividedAllowances
from pie.router.explain import ExplainStore
from pie.router.responding import ResponseStore
from pie.router.settings import RouterSettings
from pie.router.sums import Sums

_MOST_RESPONSES = 1_000_000
_SECRET_BYTES = 32


class Sharing:
    """One router's part in what all share. For one event loop.

    Args:
        settings: How much is kept.
        index_url: Redis.
        index: Key prefix.
        secret: 32 bytes that all of the cluster share; without it nothing is shared that others must not read.
        routers: How many routers there are at least.
        on_untold: Told how many explanations others will not know of.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        index_url: str,
        index: IndexSettings | None,
        secret: bytes | None,
        routers: int,
        on_untold: Callable[[int], object],
    ) -> None:
        self._secret = secret
        self._shelves: list[PartedShelf] = []
        self.commons = Commons(index_url, index)
        self.sums = Sums(Tallies(self.commons))
        self.allowances = DividedAllowances(RedisAllowances(self.commons), routers)
        told = ShelfLimits(
            settings.explained_requests, int(settings.explained_bytes), settings.kept_s
        )
        self.explained = ExplainStore(MemoryShelf(told), self._shelf("requests", told), on_untold)
        budget = int(settings.responses_bytes)
        kept = ShelfLimits(_MOST_RESPONSES if budget else 0, budget, settings.kept_s, by_use=True)
        self.responses = ResponseStore(
            MemoryShelf(kept),
            self._shelf("responses", kept),
            secret=secret or secrets.token_bytes(_SECRET_BYTES),
            retry_after_s=settings.retry_after_s,
        )

    async def trim(self) -> None:
        """Have Redis forget what is old.

        Raises:
            PageIndexError: It does not, or not now.
        """
        for shelf in self._shelves:
            await shelf.trim()

    async def close(self) -> None:
        """Tell others what they were not told yet, if that can be done soon, and let go."""
        await self.sums.close()
        await self.explained.close()
        await self.commons.close()

    def _shelf(self, name: str, limits: ShelfLimits) -> Shelf | None:
        if self._secret is None or not limits.most:
            return None
        shelf = PartedShelf(self.commons, sealed_name(name, self._secret), limits)
        self._shelves.append(shelf)
        return SealedShelf(shelf, name, self._secret)

"""A pool node: a tiered cache that other processes reach over the wire.

Covers serving, publishing to the index, and stopping. Does not cover what is kept
(`pie.pool.cache`) or who starts nodes (`pie.cluster`).
"""

from __future__ import annotations

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId
from pie.policies.retention import RetentionPolicy
from pie.pool.settings import PoolSettings


class PoolNode:
    """Serves pages from RAM. `retention` defaults to `lru`."""

    def __init__(
        self,
        place: PlaceId,
        settings: PoolSettings,
        *,
        index_url: str,
        epoch: Epoch,
        address: str | None = None,
        retention: RetentionPolicy | None = None,
    ) -> None: ...

    async def start(self) -> PlaceRecord:
        """Listen, announce to the index, and return the record that was announced."""
        raise NotImplementedError

    async def drain(self, timeout_s: float) -> None:
        """Refuse new stores and wait until what is being sent has been sent."""

    async def close(self) -> None:
        """Stop at once and leave nothing behind."""

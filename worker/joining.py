"""How a worker joins its cluster: what it follows there, and what it says of itself.

Covers building what follows pool nodes and policies and what publishes pages, and closing it in order. Does not
cover how that is done (`pie.index`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pie.index.contract import PlaceRecord
from pie.index.policy_follower import PolicyFollower
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.columns import PageMasks, masks_of, together
from pie.page.events import PlaceId
from pie.policies.policy_set import PolicySet, WorkerMoves
from pie.policies.replication import FixedReplication, TabledReplication
from pie.policies.versions import PolicyVersions
from pie.pool.client import PoolClient
from pie.pool.settings import PoolSettings
from pie.worker.engine_thread import EngineThread
from pie.worker.holdings import Holdings
from pie.worker.lower_tiers import LowerTiers
from pie.worker.named_prefixes import Preloading
from pie.worker.page_pool import open_pool
from pie.worker.page_table import PageTable
from pie.worker.policy_change import PolicyChange


@dataclass(frozen=True, slots=True)
class Joining:
    """How one worker joins its cluster. For one event loop.

    What is begun here ends with `exits`.
    """

    place: PlaceId
    index_url: str
    index_settings: IndexSettings
    secret: bytes | None
    replication: TabledReplication
    exits: AsyncExitStack

    async def pool(self, settings: PoolSettings | None) -> PoolClient | None:
        """Return a client of the pool; None where the cluster has none."""
        if settings is None or not (settings.nodes or settings.outside):
            return None
        return await open_pool(
            self.exits, settings, self.index_url, self.index_settings, self.secret, self.replication
        )

    def publisher(
        self,
        record: PlaceRecord,
        holdings: Holdings,
        tiers: LowerTiers | None,
        on_fenced: Callable[[], None],
    ) -> Publisher:
        """Return what will tell the index of all that is held."""

        async def snapshot() -> PageMasks:
            return await asyncio.to_thread(
                lambda: together(
                    [masks_of(holdings.snapshot()), *([] if tiers is None else [tiers.masks()])]
                )
            )

        return Publisher(
            self.index_url, record, snapshot, settings=self.index_settings, on_fenced=on_fenced
        )

    async def policies(
        self,
        versions: PolicyVersions,
        thread: EngineThread,
        tables: Sequence[PageTable],
        tiers: LowerTiers | None,
        *,
        resolve: Callable[[PolicySet], None],
        preloading: Preloading,
        on_moves: Callable[[WorkerMoves], object],
    ) -> PolicyFollower:
        """Take on the policies that are in force now, and each that comes into force from then on."""
        self.exits.callback(preloading.end)

        def near(policies: PolicySet) -> None:
            resolve(policies)
            preloading.begin(policies.prefixes)

        near(versions.current)
        on_moves(versions.current.worker_moves())
        change = PolicyChange(versions, thread, tables, tiers, near, on_moves)
        follower = PolicyFollower(
            self.index_url,
            self.place,
            change.take,
            on_copies=self.replication.set_table,
            settings=self.index_settings,
        )
        await follower.start()
        self.exits.push_async_callback(follower.close)
        return follower


def usual_replication(settings: PoolSettings | None) -> TabledReplication:
    """Return how many nodes keep a page where no policy orders more."""
    return TabledReplication(FixedReplication(settings.copies if settings is not None else 1))

"""A worker's policies, changed while it serves.

Covers taking a version on: its prefixes, and the policies of every tier. Does not cover where versions come
from (`pie.index.policy_follower`) or how pages are handed over (`pie.policies.manager`).

The step thread hands pages over between steps, a hundred at a time; what grows with all pages there is that two
columns of numbers are copied. They are put in order beside it. A change that fails part of the way is undone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pie.index.policy_store import PolicyVersion
from pie.policies.policy_set import PolicySet, WorkerMoves
from pie.policies.prefixes import LeadingPages
from pie.policies.retention import RetentionPolicy
from pie.policies.versions import PolicyVersions
from pie.worker.between import between
from pie.worker.commands import Between
from pie.worker.engine_thread import EngineThread
from pie.worker.lower_tiers import LowerTiers
from pie.worker.page_table import PageTable

log = logging.getLogger("pie.worker.policy_change")

_MOVED_AT_ONCE = 100
_LOOKED_AT_ONCE = 2_048
"""Rows of pages whose keys are copied between two steps: a tenth of a millisecond."""
_TIERS_S = 30.0
"""How long undoing a change waits for the tiers below, which hand over millions of pages in less."""


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """What changes with the policies of one worker. For one event loop."""

    versions: PolicyVersions
    thread: EngineThread
    tables: Sequence[PageTable]
    """Those of device memory."""
    tiers: LowerTiers | None
    on_prefixes: Callable[[PolicySet], None]
    """Resolves the prefixes of policies that are about to be in force; called on a thread."""
    on_moves: Callable[[WorkerMoves], object] = lambda _: None
    """Told what the policies say of pages that this worker moves by itself."""

    async def take(self, number: int, version: PolicyVersion) -> str:
        """Take a version on; return why it cannot be, or nothing."""
        before = self.versions.current
        policies = await self.versions.look_at(number, version.text)
        if isinstance(policies, str):
            return policies
        # All of them are made, which may be a user's code, before the first is changed; and none on this event loop.
        moves = await asyncio.to_thread(policies.worker_moves)
        if not policies.same_retention(before):
            retention = await self._made(policies)
            await asyncio.to_thread(self.on_prefixes, policies)
            try:
                await self._put_in_force(retention)
            except BaseException:
                log.warning(
                    "version %d of the policies is undone: it was not taken on whole", number
                )
                await self._put_in_force(await self._made(before))
                raise
        self.on_moves(moves)
        self.versions.current = policies
        return ""

    async def _made(self, policies: PolicySet) -> list[RetentionPolicy]:
        """Return a new retention policy for each table, and after those for each tier."""
        tiers = () if self.tiers is None else self.tiers.kinds
        count = len(self.tables) + len(tiers)
        return await asyncio.to_thread(
            lambda: [policies.new_retention_aside() for _ in range(count)]
        )

    async def _put_in_force(self, retention: Sequence[RetentionPolicy]) -> None:
        for table, policy in zip(self.tables, retention, strict=False):
            await self._replace(table, policy)
        if self.tiers is not None:
            others = iter(retention[len(self.tables) :])
            tiers = asyncio.create_task(
                asyncio.to_thread(self.tiers.replace_policies, others.__next__)
            )
            try:
                await asyncio.shield(tiers)
            except asyncio.CancelledError:
                # No thread ends for that, and what is undone while it goes on would be done again.
                await asyncio.wait([tiers], timeout=_TIERS_S)
                raise

    async def _replace(self, table: PageTable, policy: RetentionPolicy) -> None:
        """Hand a table over; where that fails it is whose it was, once the step under way is done."""
        try:
            pages = await between(self.thread, lambda: table.begin_replace(policy))
            await asyncio.to_thread(pages.put_in_order)
            await self._learn(table)

            def move() -> bool:
                return table.move_over(_MOVED_AT_ONCE, time.monotonic())

            while not await between(self.thread, move):
                pass
        except BaseException:
            self.thread.put(Between(table.abandon_replace))
            raise

    async def _learn(self, table: PageTable) -> None:
        """Let who takes over know which named prefixes pages belong to, before it is handed any."""
        retention = table.retention
        prefixes = retention.prefixes
        found: list[LeadingPages] = []
        for start in range(0, retention.capacity if prefixes.depth else 0, _LOOKED_AT_ONCE):

            def look(start: int = start) -> LeadingPages:
                return retention.leading(start, start + _LOOKED_AT_ONCE, prefixes.depth)

            found.append(await between(self.thread, look))
        await asyncio.to_thread(prefixes.learn, found)

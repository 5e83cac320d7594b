"""A pool node: a tiered cache that other processes reach over the wire.

Covers starting, emptying, stopping and what the node says of itself. Does not cover the messages
(`pie.pool.serving`), what is kept (`pie.pool.cache`) or who starts nodes (`pie.cluster`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import quote

from msgspec import structs

from pie.index.contract import IndexReader, PlaceRecord
from pie.index.errors import PlaceFencedError
from pie.index.feed import MirrorFeed
from pie.index.mirror import Mirror
from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PolicyVersion
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.columns import PageMasks
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.manager import RetentionManager
from pie.policies.policy_set import PolicySet
from pie.policies.replication import FixedReplication, ReplicationPolicy, TabledReplication
from pie.policies.versions import PolicyVersions
from pie.pool.cache import Level, TieredCache
from pie.pool.checksum import Checksum
from pie.pool.disk import DiskTier
from pie.pool.index_relay import IndexRelay
from pie.pool.lanes import Lanes
from pie.pool.links import NodeLinks
from pie.pool.migration import Migration
from pie.pool.mover import Mover
from pie.pool.object import ObjectTier
from pie.pool.object_figures import ObjectFigures, figures
from pie.pool.ram import RamTier
from pie.pool.sealing import Sealing, SealingCounters
from pie.pool.serving import PoolService
from pie.pool.settings import PoolSettings
from pie.pool.side_threads import SideThreads, within
from pie.pool.status import PoolStatus
from pie.pool.tier import TierKind
from pie.wire import freed_memory
from pie.wire.figures import report
from pie.wire.messages import AskStatus, Message
from pie.wire.peer import Peer
from pie.wire.place_orders import Drained, DrainNode
from pie.wire.server import WireServer
from pie.wire.settings import WireSettings

log = logging.getLogger("pie.pool.node")

_OWN_TIERS = (TierKind.POOL_RAM, TierKind.POOL_DISK)
"""What a node has for itself: the pages of these are moved, and their budgets are its share."""
_SAVE_SHARE = 0.25
"""Of the time to drain, at least, for what other nodes have not taken."""
_LAST_PAGE_S = 1.0
"""How long saving may take beyond its time: the page under way."""
_CLOSE_S = 10.0
"""How long closing waits for what a disk is doing; a bucket has its own limit three times besides: for
what is asked of it, what waits to be written and the list of that."""
_OPEN_ENDS_S = 0.1
"""How long the end of a start waits, on the event loop, for its thread: a disk may hold that."""
_LOCK_TIMEOUT_S = 10.0
"""How long a process that was told to end, or is being killed, may still hold the folder."""


class PoolNode:
    """Serves pages from its tiers, and says in the index which. For one event loop."""

    def __init__(
        self,
        place: PlaceId,
        settings: PoolSettings,
        *,
        index_url: str | None,
        epoch: Epoch,
        address: str | None = None,
        policies: PolicySet | None = None,
        secret: bytes | None = None,
        encryption_keys: Sequence[bytes] = (),
        on_dead: Callable[[BaseException], None] | None = None,
        on_drained: Callable[[], None] | None = None,
        reader: IndexReader | None = None,
        replication: ReplicationPolicy | None = None,
        index_settings: IndexSettings | None = None,
        wire_settings: WireSettings | None = None,
    ) -> None:
        """Prepare a node; it takes memory and an address from `start` on.

        Args:
            place: The node's name, the same across restarts.
            settings: Budgets and limits.
            index_url: Redis; None serves without telling anybody.
            epoch: This start's number, larger than those of earlier starts.
            address: Where to listen; a free port of loopback where None.
            policies: Which pages leave each tier first, until others are applied; the built-ins where None.
            secret: 32 bytes that all of the cluster share, where pages are to be keyed with them; an
                address beyond this host needs them.
            encryption_keys: What pages on disk and in the bucket are encrypted with: the first writes, all read.
            on_dead: Called on the event loop when this start is over because a later one is up:
                the process should be replaced.
            on_drained: Called when somebody asked for the node to be emptied and that is over.
            reader: Which other nodes there are; what the index says where None.
            replication: How many nodes keep a page; what the settings say where None.
            index_settings: Key prefix and limits of the index.
            wire_settings: Limits of the wire.
        """
        self.place = place
        self.epoch = epoch
        self._settings = settings
        self._index_url = index_url
        self._index_settings = index_settings or IndexSettings()
        self._policies = PolicyVersions(policies or PolicySet())
        self._follower: PolicyFollower | None = None
        new_retention = self._policies.current.new_retention_aside
        self._tier = RamTier(int(settings.ram_budget), checksum=Checksum(secret))
        self._relay = IndexRelay()
        levels = [Level(self._tier, RetentionManager(new_retention(), name=f"{place} ram"))]
        self._disk: DiskTier | None = None
        if settings.disk_budget:
            self._disk = DiskTier(
                [folder / quote(place, safe="") for folder in settings.disk_folders],
                int(settings.disk_budget),
                sealing=Sealing(
                    secret,
                    compression=settings.disk_compression,
                    keys=encryption_keys,
                    name=f"{place} disk",
                ),
                durability=settings.disk_durability,
                keep_bad_pages=settings.keep_bad_pages,
                on_lost=self._changed,
            )
            manager = RetentionManager(new_retention(), name=f"{place} disk")
            levels.append(Level(self._disk, manager))
        self._close_s = _CLOSE_S
        self._object: ObjectTier | None = None
        if settings.object_bucket:
            self._object = _object_tier(
                settings,
                Sealing(
                    secret,
                    compression=settings.object_compression,
                    keys=encryption_keys,
                    name=f"{place} bucket",
                ),
                self._changed,
            )
            self._close_s += 3 * settings.object_timeout_s
            manager = RetentionManager(new_retention(), name=f"{place} object")
            levels.append(Level(self._object, manager))
        own = (level.tier for level in levels if level.tier.kind in _OWN_TIERS)
        self._capacity_bytes = sum(tier.budget_bytes for tier in own)
        self._cache = TieredCache(levels, index=self._relay)
        writes_through = self._object is not None and settings.object_write_through
        self._mover = Mover(self._cache, writes_through=writes_through)
        self._lanes = Lanes(settings.check_threads, len(levels))
        self._service = PoolService(self._cache, self._lanes, settings)
        self._server = WireServer(
            address or "tcp://127.0.0.1:0",
            self._handle,
            epoch=epoch,
            settings=wire_settings,
            secret=secret,
        )
        self._on_dead = on_dead
        self._on_drained = on_drained
        self._feed: MirrorFeed | None = None
        if reader is None:
            reader = mirror = Mirror()
            if index_url is not None:
                self._feed = MirrorFeed(
                    index_url, mirror, settings=self._index_settings, with_pages=False
                )
        self._links = NodeLinks(reader, wire_settings, secret=secret)
        self._replication = TabledReplication(replication or FixedReplication(settings.copies))
        self._migration = Migration(
            place,
            self._cache,
            self._links,
            reader,
            replication=self._replication,
            tiers=_OWN_TIERS,
            bytes_per_s=float(settings.move_rate),
            settle_s=settings.move_after_s,
            on_settled=self._settled,
        )
        self._emptying: asyncio.Task[tuple[int, int]] | None = None
        self._publisher: Publisher | None = None
        self._record: PlaceRecord | None = None

    @property
    def record(self) -> PlaceRecord:
        """What the node announced.

        Raises:
            RuntimeError: It has not started.
        """
        if self._record is None:
            raise RuntimeError("the node has not started")
        return self._record

    async def start(self, may_announce: Callable[[], Awaitable[bool]] | None = None) -> PlaceRecord:
        """Listen, announce to the index, and return the record that was announced.

        Redis may be away: the node serves, and announces itself as soon as it can and `may_announce` lets it.

        Raises:
            AddressError: The address cannot be had.
            FolderInUseError: Another process keeps its pages in this node's folder.
        """
        if self._cache.is_tiered:
            opening = SideThreads("pie-pool-open")
            try:
                await asyncio.get_running_loop().run_in_executor(opening, self._open_lower)
            finally:
                opening.close(_OPEN_ENDS_S)
        address = await self._server.start()
        self._record = PlaceRecord(
            place=self.place,
            epoch=self.epoch,
            kind=PlaceKind.POOL,
            address=address,
            tiers=tuple(int(tier) for tier in self._cache.tiers),
            capacity_bytes=self._capacity_bytes,
            copies=self._settings.copies,
            ttl_s=self._index_settings.ttl_s,
        )
        if self._index_url is not None:
            self._publisher = Publisher(
                self._index_url,
                self._record,
                lambda: asyncio.to_thread(self._held),
                settings=self._index_settings,
                on_fenced=self._fenced,
                may_announce=may_announce,
                # An announcement is made of all keys.
                on_mode=lambda _: freed_memory.give_back(),
            )
            self._relay.connect(self._publisher)
            await self._publisher.start()
            self._follower = PolicyFollower(
                self._index_url,
                self.place,
                self._take_policies,
                on_copies=self._take_copies,
                settings=self._index_settings,
            )
            await self._follower.start()
        if self._feed is not None:
            await self._feed.start()
        self._migration.start()
        log.info("%s serves at %s with %d bytes", self.place, address, self._tier.budget_bytes)
        return self._record

    async def drain(self, timeout_s: float) -> None:
        """Refuse new stores and wait, at most so long, until what is under way is done.

        Where the settings say so, other nodes are handed all pages first. What only RAM holds after that
        goes to the next tier, as far as the time lasts: a quarter of it is left for that.
        """
        until_s = time.monotonic() + timeout_s
        save_s = _SAVE_SHARE * timeout_s if self._cache.is_tiered else 0.0
        self._service.drain()
        if self._settings.drain_on_stop:
            await self.empty(timeout_s - save_s)
        try:
            async with asyncio.timeout(max(0.0, until_s - save_s - time.monotonic())):
                await self._service.idle()
        except TimeoutError:
            log.warning(
                "%s: transfers still under way after %.1f s", self.place, timeout_s - save_s
            )
        await asyncio.to_thread(self._save, until_s)

    def _save(self, until_s: float) -> None:
        limit_s = until_s - time.monotonic() + _LAST_PAGE_S
        if not within(limit_s, "pie-save", lambda: self._cache.save(until_s)):
            log.warning("%s: a page is not in the next tier yet; no more are saved", self.place)

    async def empty(self, timeout_s: float) -> tuple[int, int]:
        """Take no more pages and hand all to other nodes, as far as that goes in time.

        Returns how many were sent, and how many nobody has taken. What is asked for is read from here
        until the end.
        """
        self._service.drain()
        if self._record is not None and not self._record.draining:
            self._say(structs.replace(self._record, draining=True))
        before = self._migration.counters.moved
        left = await self._migration.empty(timeout_s)
        moved = self._migration.counters.moved - before
        log.info("%s handed %d pages to other nodes, and has %d left", self.place, moved, left)
        return moved, left

    async def close(self) -> None:
        """Stop at once: the index forgets the node.

        Nothing is left behind but a thread that a disk holds for longer than a few seconds.
        """
        self._service.drain()
        if self._emptying is not None:
            self._emptying.cancel()
            await asyncio.gather(self._emptying, return_exceptions=True)
        if self._follower is not None:
            await self._follower.close()
        await self._migration.close()
        await self._server.close()
        await self._links.close()
        if self._feed is not None:
            await self._feed.close()
        # No handler runs any more; a copy that a thread has begun ends within milliseconds.
        await asyncio.to_thread(self._lanes.close)
        await asyncio.to_thread(self._mover.close)
        if self._publisher is not None:
            self._relay.connect(None)
            await self._publisher.close()
        if not await asyncio.to_thread(self._cache.close, self._close_s):
            log.warning("%s: its tiers do not close and are left behind", self.place)

    def status(self) -> PoolStatus:
        """Return the node's numbers."""
        counters, service, disk = self._cache.counters, self._service, self._disk
        bad, policy = self._cache.bad_pages, self._cache.policy_counts
        sealed = SealingCounters() if disk is None else disk.sealing.counters
        bucket = ObjectFigures() if self._object is None else figures(self._object)
        return PoolStatus(
            place=self.place,
            epoch=self.epoch,
            address="" if self._record is None else self._record.address,
            index_mode="" if self._publisher is None else str(self._publisher.mode),
            draining=service.draining,
            policy_version=0 if self._follower is None else self._follower.state.version,
            policy_refused=0 if self._follower is None else self._follower.state.refused,
            used_bytes=self._cache.used_bytes,
            budget_bytes=self._cache.budget_bytes,
            pages=self._cache.pages_by_tier(),
            tier_used_bytes=self._cache.bytes_by_tier(),
            tier_budget_bytes=self._cache.budgets_by_tier(),
            disk_folders={} if disk is None else dict(disk.folder_states()),
            claims=len(service.claims),
            loans=service.loans,
            pinned_pages=len(service.pinned),
            pinned_bytes=service.pinned.bytes,
            hits=counters.hits,
            misses=counters.misses,
            pending=counters.pending,
            stored=counters.stored,
            evicted=counters.evicted,
            demoted=counters.demoted,
            promoted=counters.promoted,
            no_room=counters.no_room,
            policy_failures=policy.failures,
            policy_fallbacks=policy.fallbacks,
            policy_proposals_refused=policy.refused(),
            policy_failing=policy.failing(),
            bad_pages={
                "at_store": bad.at_store,
                "at_load": bad.at_load,
                "malformed": service.malformed,
            },
            to_move=self._migration.to_move,
            moved=self._migration.counters.moved,
            moved_bytes=self._migration.counters.moved_bytes,
            move_failed=self._migration.counters.failed,
            sent_bytes=service.sent_bytes,
            received_bytes=service.received_bytes,
            disk_errors={} if disk is None else dict(disk.errors),
            disk_bad_pages={} if disk is None else dict(disk.bad_by_reason),
            disk_raw_bytes=sealed.raw_bytes,
            disk_packed_bytes=sealed.packed_bytes,
            disk_opened_bytes=sealed.opened_bytes,
            disk_packed_pages={} if disk is None else dict(disk.sealing.pages_by_codec),
            disk_seal_s=sealed.seal_s,
            disk_open_s=sealed.open_s,
            disk_locked_pages=sealed.locked,
            object_state=bucket.state,
            object_buffered_bytes=bucket.buffered_bytes,
            object_errors=bucket.errors,
            object_bad_pages=bucket.bad_pages,
            object_opened=bucket.opened,
            object_read_bytes=bucket.read_bytes,
            object_written_bytes=bucket.written_bytes,
            object_written=bucket.written,
            object_removed=bucket.removed,
            object_lost_races=bucket.lost_races,
            object_dropped_pages=bucket.dropped_pages,
            write_through_waiting=self._mover.waiting,
            write_through_passed_over=self._mover.passed_over,
            object_raw_bytes=bucket.raw_bytes,
            object_packed_bytes=bucket.packed_bytes,
            object_packed_pages=bucket.packed_pages,
            object_seal_s=bucket.seal_s,
            object_open_s=bucket.open_s,
            object_locked_pages=bucket.locked_pages,
        )

    def check(self) -> None:
        """Assert that all tables agree. Only while the node is idle."""
        self._cache.check()
        self._service.claims.check()
        self._service.pinned.check()

    def _open_lower(self) -> None:
        """Find what an earlier start left, and from then on move pages between the tiers."""
        began_s = time.monotonic()
        with freed_memory.given_back():
            if self._disk is not None:
                self._disk.open(_LOCK_TIMEOUT_S)
            if self._object is not None:
                self._object.open()
            found = self._cache.adopt()
        took_s = time.monotonic() - began_s
        log.info("%s found %d pages below RAM in %.1f s", self.place, found, took_s)
        self._mover.start()

    def _held(self) -> PageMasks:
        """Return what is announced, in arrays that leave no memory behind."""
        with freed_memory.given_back():
            return self._cache.masks()

    def _say(self, record: PlaceRecord) -> None:
        self._record = record
        if self._publisher is not None:
            self._publisher.change(record)

    def _settled(self, view: str) -> None:
        if self.record.settled != view:
            self._say(structs.replace(self.record, settled=view))

    def _take_copies(self, table: Mapping[PageKey, int]) -> None:
        """Learn which groups more nodes keep than usual."""
        if self._replication.set_table(table):
            self._migration.look_again()

    async def _take_policies(self, number: int, version: PolicyVersion) -> str:
        """Take a version of the policies on; return why it cannot be, or nothing."""
        policies = await self._policies.look_at(number, version.text)
        if isinstance(policies, str):
            return policies
        if not policies.same_retention(self._policies.current):
            new_retention = policies.new_retention_aside
            await asyncio.to_thread(self._cache.replace_policies, new_retention)
            self._mover.preload()
        self._policies.current = policies
        return ""

    def _changed(self) -> None:
        self._mover.reconcile_soon()

    def _fenced(self) -> None:
        """Take nothing more; whoever made this node ends its process."""
        error = PlaceFencedError(f"{self.place} is up in a later epoch than {self.epoch}")
        log.error("%s ends: %s", self.place, error)
        self._service.drain()
        if self._on_dead is not None:
            self._on_dead(error)

    async def _handle(self, peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        """Take one message: what is about the node itself here, what is about pages elsewhere."""
        if isinstance(message, AskStatus):
            state = "draining" if self._service.draining else "serving"
            status = self.status()
            await peer.send(report(message.request_id, self.place, self.epoch, state, status))
        elif isinstance(message, DrainNode):
            if self._emptying is None:
                self._emptying = asyncio.create_task(self.empty(message.timeout_s))
            # Whoever asked may leave: it goes on.
            moved, left = await asyncio.shield(self._emptying)
            await peer.send(Drained(message.request_id, moved, left))
            if self._on_drained is not None:
                self._on_drained()
        else:
            await self._service.handle(peer, message, frames)


def _object_tier(
    settings: PoolSettings, sealing: Sealing, on_changed: Callable[[], None]
) -> ObjectTier:
    # Only a node with a bucket pays for importing boto3.
    from pie.pool.object_s3 import S3Store  # noqa: PLC0415

    return ObjectTier(
        S3Store(settings),
        int(settings.object_budget),
        name=f"bucket {settings.object_bucket}",
        sealing=sealing,
        threads=settings.object_threads,
        timeout_s=settings.object_timeout_s,
        buffer_bytes=int(settings.object_buffer),
        look_s=settings.object_look_s,
        on_changed=on_changed,
    )

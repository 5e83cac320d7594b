"""Pool nodes in virtual time: which of them keeps what, and pages on their way between them.

Covers the real placement over mock tiers, reads that share a node's link, and copies that come and go as the
table of copies or the nodes change. Does not cover what one node holds (`pie.simulator.tier`) or who orders
copies (`pie.simulator.conductor`).

As live nodes do (`pie.pool.migration`), one that has a page which another should have sends it at `MOVE_RATE`
and no faster than its link, a target that is full refuses, and a copy that is not wanted any more goes only
when all that should have the page have had it for `GRACE_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pie.index.contract import PlaceRecord
from pie.page.events import PageEntry, PlaceId
from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey
from pie.policies.replication import FixedReplication, TabledReplication
from pie.pool.pace import Pace
from pie.pool.placement import Placement
from pie.simulator.clock import Clock
from pie.simulator.cost_model import CostModel
from pie.simulator.loads import Reading, end_reading
from pie.simulator.tier import MockTier, OnChange
from pie.worker.load_choice import LoadTier
from pie.worker.page_table import FrozenPage

MOVE_RATE = 64 << 20
"""Bytes a second that a node hands to others, as `pie.pool.settings` has it."""
GRACE_S = 2.0
_MOST_HOMES = 65_536
"""Groups of which is remembered where they belong."""

NewTier = Callable[[PlaceRecord, OnChange], MockTier]
"""Makes a node's tier, which tells what comes and goes."""


@dataclass(eq=False, slots=True)
class PoolNode:
    """One node."""

    record: PlaceRecord
    tier: MockTier
    pace: Pace
    free_at_s: float = 0.0
    """When its link has sent what it was asked for."""


@dataclass(eq=False, slots=True)
class _Pooled:
    """A page that some node has."""

    frozen: FrozenPage
    group: PageKey
    holders: list[PoolNode] = field(default_factory=list)


class SimulatedPool:
    """All nodes.

    Args:
        records: What they say of themselves.
        new_tier: Makes the tier of each.
        cost: How long transfers take.
        page_tokens: Tokens in a page.
        clock: The time.
        on_record: Told of a record that has changed.
        on_gone: Told of a node that has left.
    """

    def __init__(
        self,
        records: Sequence[PlaceRecord],
        new_tier: NewTier,
        cost: CostModel,
        *,
        page_tokens: int,
        clock: Clock,
        on_record: Callable[[PlaceRecord], None],
        on_gone: Callable[[PlaceId], None],
    ) -> None:
        self.copied = 0
        """Pages that one node sent to another."""
        self.dropped = 0
        """Copies that were too many, and went."""
        self._cost = cost
        self._page_tokens = page_tokens
        self._page_bytes = cost.bytes_of(page_tokens)
        self._clock = clock
        self._on_record = on_record
        self._on_gone = on_gone
        self._pages: dict[PageKey, _Pooled] = {}
        self._groups: dict[PageKey, dict[PageKey, None]] = {}
        self._coming: dict[PageKey, tuple[FrozenPage, PageKey]] = {}
        self._table: Mapping[PageKey, int] = {}
        self._replication = TabledReplication(FixedReplication())
        self._nodes: dict[PlaceId, PoolNode] = {}
        self._gone: list[PoolNode] = []
        for record in records:
            tier = new_tier(record, self._listener(record.place))
            self._nodes[record.place] = PoolNode(record, tier, Pace(MOVE_RATE, 0.0))
        self._homes: dict[PageKey, list[PoolNode]] = {}
        self._placement = self._placed()
        self._unsettled: dict[PageKey, float | None] = {}
        """Groups that may not lie where they belong; since when all homes have all of it, where they do."""
        self._moving: set[PageKey] = set()

    def __len__(self) -> int:
        """Return how many different pages there are."""
        return len(self._pages)

    @property
    def nodes(self) -> Mapping[PlaceId, PoolNode]:
        """The nodes that are up."""
        return self._nodes

    @property
    def stored(self) -> int:
        """Pages that came to a node from a worker."""
        return sum(node.tier.stored for node in (*self._nodes.values(), *self._gone)) - self.copied

    @property
    def evicted(self) -> int:
        """Copies that left for others."""
        return sum(node.tier.evicted for node in (*self._nodes.values(), *self._gone))

    @property
    def is_settled(self) -> bool:
        """Whether no node is about to leave, and no page about to move."""
        leaving = any(node.record.draining for node in self._nodes.values())
        return not (leaving or self._unsettled)

    def has(self, key: PageKey) -> bool:
        """Say whether any node has a page."""
        return key in self._pages

    def page(self, key: PageKey) -> FrozenPage | None:
        """Return what names a page; None where no node has it."""
        pooled = self._pages.get(key)
        return None if pooled is None else pooled.frozen

    def run(self, keys: Sequence[PageKey]) -> int:
        """Return how many leading pages nodes have together."""
        count = 0
        while count < len(keys) and keys[count] in self._pages:
            count += 1
        return count

    def put_some(self, pages: Sequence[FrozenPage], keys: Sequence[PageKey]) -> None:
        """Bring pages of a sequence, whose keys from its first page on are given, to where they belong."""
        self.put((page, keys[page.index - page.index % GROUP_PAGES]) for page in pages)

    def put(self, pages: Iterable[tuple[FrozenPage, PageKey]]) -> None:
        """Bring pages, in order of their sequence, each with its group, to the nodes that should keep them."""
        by_home: dict[PlaceId, list[FrozenPage]] = {}
        for page, group in pages:
            self._coming[page.key] = (page, group)
            for node in self._homes_of(group):
                by_home.setdefault(node.record.place, []).append(page)
        for place, some in by_home.items():
            self._nodes[place].tier.put(some)
        self._coming.clear()

    def begin(self, keys: Sequence[PageKey], from_s: float) -> tuple[Reading, float]:
        """Begin to read pages, each at one of the nodes that have it: whose link is free first.

        Of a node's link all that read have their turn one after the other.
        """
        shares: dict[PlaceId, list[PageKey]] = {}
        node: PoolNode | None = None
        group: PageKey | None = None
        for key in keys:
            pooled = self._pages[key]
            if node is None or pooled.group != group or node not in pooled.holders:
                group = pooled.group
                node = min(pooled.holders, key=self._free_at)
            shares.setdefault(node.record.place, []).append(key)
        reading: list[tuple[MockTier, PageKey]] = []
        ready_s = from_s + self._cost.load_s(LoadTier.POOL, len(keys) * self._page_tokens)
        for place, some in shares.items():
            node = self._nodes[place]
            node.tier.pin(some)
            reading += [(node.tier, key) for key in some]
            ready_s = max(ready_s, self._take_link(node, len(some), from_s))
        return reading, ready_s

    def end(self, reading: Reading) -> None:
        """End what `begin` began."""
        end_reading(reading)

    def drop(self, keys: Sequence[PageKey]) -> None:
        """Let go of pages at all nodes, unless somebody reads them."""
        for node in self._nodes.values():
            node.tier.drop(keys)

    def set_table(self, table: Mapping[PageKey, int]) -> None:
        """Take on which groups have more copies than usual."""
        before, self._table = self._table, dict(table)
        if not self._replication.set_table(self._table):
            return
        for group in {**before, **self._table}:
            if before.get(group) != self._table.get(group):
                self._homes.pop(group, None)
                self._unsettled[group] = None

    def leave(self, place: PlaceId) -> None:
        """Let a node hand its pages to others; it is down when it has none left."""
        node = self._nodes[place]
        node.record = msgspec.structs.replace(node.record, draining=True)
        self._on_record(node.record)
        self._homes.clear()
        self._placement = self._placed()
        self._unsettled.update(dict.fromkeys(self._groups))

    def look(self) -> None:
        """Do what is next for groups that may not lie where they belong."""
        now_s = self._clock.now_s()
        for group in list(self._unsettled):
            if group not in self._moving:
                self._look_at(group, now_s)
        for place, node in list(self._nodes.items()):
            if node.record.draining and not len(node.tier):
                self._gone.append(self._nodes.pop(place))
                self._homes.clear()
                self._placement = self._placed()
                self._on_gone(place)

    def check(self) -> None:
        """Raise `AssertionError` where nodes contradict what is known of them."""
        for node in self._nodes.values():
            node.tier.check()
        held = {key: set[PlaceId]() for key in self._pages}
        for place, node in self._nodes.items():
            for page in node.tier.pages():
                held[page.key].add(place)
        for key, pooled in self._pages.items():
            assert {node.record.place for node in pooled.holders} == held[key]
            assert held[key], "a page that no node has is none"
            assert key in self._groups[pooled.group]
        assert sum(map(len, self._groups.values())) == len(self._pages)

    def _placed(self) -> Placement:
        records = {place: node.record for place, node in self._nodes.items()}
        return Placement(records, self._replication)

    def _homes_of(self, group: PageKey) -> list[PoolNode]:
        homes = self._homes.get(group)
        if homes is None:
            if len(self._homes) >= _MOST_HOMES:
                self._homes.clear()
            homes = [self._nodes[place] for place in self._placement.homes(group)]
            self._homes[group] = homes
        return homes

    def _free_at(self, node: PoolNode) -> tuple[float, PlaceId]:
        return max(node.free_at_s, self._clock.now_s()), node.record.place

    def _take_link(self, node: PoolNode, pages: int, from_s: float) -> float:
        """Send pages over a node's link at a time or when it is free; return when they have come."""
        seconds = pages * self._page_tokens / self._cost.node_tokens_per_s
        node.free_at_s = max(node.free_at_s, from_s) + seconds
        return node.free_at_s + self._cost.load_ms / 1e3

    def _look_at(self, group: PageKey, now_s: float) -> None:
        """Send what is missing of a group to one node, or let go of copies that are too many."""
        pages = [self._pages[key] for key in self._groups.get(group, ())]
        homes = self._homes_of(group)
        for home in homes:
            lacks = [one for one in pages if home not in one.holders]
            if not lacks:
                continue
            self._unsettled[group] = None
            source = min(lacks[0].holders, key=self._free_at)
            some = [one.frozen for one in lacks if source in one.holders]
            delay_s = source.pace.delay_s(len(some) * self._page_bytes, now_s)
            ready_s = self._take_link(source, len(some), now_s + delay_s)
            self._moving.add(group)
            self._clock.at(ready_s, self._arrival(group, some, source, home))
            return
        extra = [(one, node) for one in pages for node in one.holders if node not in homes]
        if not extra or not homes:
            del self._unsettled[group]
            return
        since_s = self._unsettled[group]
        if since_s is None:
            self._unsettled[group] = now_s
        elif now_s - since_s >= GRACE_S:
            for one, node in extra:
                before = len(node.tier)
                node.tier.drop((one.frozen.key,))
                self.dropped += before - len(node.tier)

    def _arrival(
        self, group: PageKey, pages: Sequence[FrozenPage], source: PoolNode, home: PoolNode
    ) -> Callable[[], None]:
        def arrived() -> None:
            self._moving.discard(group)
            before = home.tier.stored
            if home.record.place in self._nodes:
                there = [one for one in pages if source.tier.has(one.key)]
                self._coming.update((one.key, (one, group)) for one in there)
                home.tier.put(there, may_evict=False)
                self._coming.clear()
            came = home.tier.stored - before
            self.copied += came
            # A target that is full is asked again when all others have had their turn.
            if came and group in self._unsettled:
                self._look_at(group, self._clock.now_s())

        return arrived

    def _listener(self, place: PlaceId) -> OnChange:
        def changed(entries: Sequence[PageEntry], stored: bool) -> None:
            node = self._nodes[place]
            for entry in entries:
                if stored:
                    self._note(entry.key, node)
                else:
                    self._forget(entry.key, node)

        return changed

    def _note(self, key: PageKey, node: PoolNode) -> None:
        pooled = self._pages.get(key)
        if pooled is None:
            frozen, group = self._coming[key]
            pooled = self._pages[key] = _Pooled(frozen, group)
            self._groups.setdefault(group, {})[key] = None
        pooled.holders.append(node)

    def _forget(self, key: PageKey, node: PoolNode) -> None:
        pooled = self._pages.get(key)
        if pooled is None or node not in pooled.holders:
            return
        pooled.holders.remove(node)
        if pooled.holders:
            return
        del self._pages[key]
        group = self._groups[pooled.group]
        del group[key]
        if not group:
            del self._groups[pooled.group]

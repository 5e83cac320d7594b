"""Who holds the pages of one prompt, and how many of them each worker could use.

Covers runs of held pages, what pool nodes add to them, and prefixes in the making. Does not cover what a policy
is shown of that (`pie.router.choice`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from pie.index.contract import IndexReader, PlaceRecord
from pie.index.runs import MaskRun
from pie.page.events import Part, PartMask, PlaceId, PlaceKind, Tier, part_tiers
from pie.page.key import PageKey
from pie.page.layout import usable_segments
from pie.router.books import WorkerBooks
from pie.router.coming import Coming, for_worker, in_making
from pie.router.rates import FleetRates

_Segments = Sequence[tuple[PartMask, int]]
_NEAREST = ((Tier.HOST, "host"), (Tier.DISK, "disk"))
_DEVICE = 1 << Tier.DEVICE
_HOP_PAGES = 64
"""Pages asked for where a run goes on at another pool node: two of the groups that nodes keep."""


class Held(msgspec.Struct, frozen=True):
    """How many of a prompt's leading pages a worker could use, by where they are."""

    device_pages: int = 0
    load_pages: Mapping[str, int] = msgspec.field(default_factory=dict)

    @property
    def pages(self) -> int:
        """All of them."""
        return self.device_pages + sum(self.load_pages.values())


def pool_nodes(places: Mapping[PlaceId, PlaceRecord]) -> Collection[PlaceId]:
    """Return which places are pool nodes."""
    return {place for place, record in places.items() if record.kind is PlaceKind.POOL}


class Runs:
    """Who holds the pages of one prompt.

    Args:
        index: Who has which page.
        keys: The prompt's pages.
        nodes: The pool nodes that are up; looked for where None.
        runs: What the index says of places that are asked about; asked for where None.
    """

    def __init__(
        self,
        index: IndexReader,
        keys: Sequence[PageKey],
        nodes: Collection[PlaceId] | None = None,
        runs: Mapping[PlaceId, Sequence[PartMask]] | None = None,
    ) -> None:
        self.keys = keys
        self._index = index
        self._pool_nodes = pool_nodes(index.places()) if nodes is None else nodes
        if runs is None:
            runs = index.matches(keys) if keys else {}
        self._runs = runs
        self._pooled: dict[int, _Segments] = {}
        self._held_by_kind: dict[tuple[object, ...], Held] = {}
        self._making: list[tuple[WorkerBooks, int]] = []
        self._coming: Sequence[Coming] = ()

    def held(self, link: WorkerBooks) -> Held:
        """Return what `link`'s worker could use."""
        record = link.record
        held = self.stored(self._runs.get(record.place), record)
        making = link.pages_in_making(self.keys)
        if making:
            self._making.append((link, making))
            return in_the_making(held, making)
        return held

    def stored(self, own: Sequence[PartMask] | None, record: PlaceRecord) -> Held:
        """Return what a worker with such a record could use that has `own` of the prompt, but for what is being made."""
        return self._pooled_for(record) if own is None else self._held_with(own, record)

    def _pooled_for(self, record: PlaceRecord) -> Held:
        """Return what workers could use that have nothing of the prompt: of a thousand, most."""
        kind = (record.parts, record.window_tokens, record.page_tokens)
        held = self._held_by_kind.get(kind)
        if held is None:
            held = self._held_by_kind[kind] = held_pages((), self._pool(0), record)
        return held

    def _held_with(self, own: Sequence[PartMask], record: PlaceRecord) -> Held:
        pool = self._pool(0)
        if self._pool_nodes and sum(pages for _, pages in pool) < len(own):
            # The pool may go on where the worker ends, without what the worker has.
            pool = self._pool(len(own))
        return held_pages(_segments(own), pool, record)

    def find_coming(self, rates: FleetRates) -> None:
        """Find out what is in the making, once all workers have been asked for, and when it is there."""
        if self._pool_nodes:
            found = (in_making(link, self.keys, pages, rates) for link, pages in self._making)
            self._coming = [one for one in found if one is not None]

    def coming(self, place: PlaceId) -> Coming | None:
        """Return what a worker could wait for."""
        return for_worker(place, self._coming) if self._coming else None

    def at_workers(self) -> dict[PlaceId, int]:
        """Return how many leading pages each worker has itself that has any, in any tier."""
        records = self._index.places()
        found = {}
        # Of a thousand workers few have any of it.
        for place, run in self._runs.items():
            record = records.get(place)
            if record is None or record.kind is not PlaceKind.WORKER or not record.parts:
                continue
            if pages := held_pages(_segments(run), (), record).pages:
                found[place] = pages
        return found

    def pooled(self) -> int:
        """Return how many leading pages pool nodes have together."""
        return sum(pages for _, pages in self._pool(0))

    def _pool(self, start: int) -> _Segments:
        """Return the run that pool nodes hold together from page `start` on; before it they hold nothing.

        Groups of pages are spread over nodes, so that a run goes on at another node where it ends.
        """
        known = self._pooled.get(start)
        if known is not None:
            return known
        segments: list[tuple[PartMask, int]] = [(PartMask(0), start)] if start else []
        at, asked = start, 0
        while at < len(self.keys) and self._pool_nodes:
            if at:
                # All that is left, at every hop, would be quadratic.
                asked = max(2 * asked, _HOP_PAGES)
                runs = self._index.matches(self.keys[at : at + asked])
            else:
                runs, asked = self._runs, len(self.keys)
            nodes = (run for place, run in runs.items() if place in self._pool_nodes)
            best = max(nodes, key=len, default=None)
            if not best:
                break
            segments += _segments(best)
            at += len(best)
            asked = asked if len(best) == asked else 0
        self._pooled[start] = segments
        return segments


def held_pages(own: _Segments, pool: _Segments, record: PlaceRecord) -> Held:
    """Return how many leading pages a worker could use that holds `own` and may load from `pool`."""
    if not own and not pool:
        return Held(0, {})
    parts = tuple(Part(part) for part in record.parts)
    merged = list(_merge(own, pool))
    main = Part.FULL if Part.FULL in parts else parts[0]
    if parts == (Part.FULL,):
        usable = 0
        for a, b, pages in merged:
            if not part_tiers(PartMask(a | b), Part.FULL):
                break
            usable += pages
    else:
        usable = usable_segments(
            ((PartMask(a | b), pages) for a, b, pages in merged),
            parts=parts,
            window_tokens=record.window_tokens,
            page_tokens=record.page_tokens,
        )
    if record.has_states_alone:
        return _held_snapshots([(a, pages) for a, _, pages in merged], usable)
    device = 0
    loads: dict[str, int] = {}
    for a, _, found in merged:
        pages = min(found, usable)
        if not pages:
            break
        usable -= pages
        tiers = part_tiers(a, main)
        if tiers & _DEVICE:
            device += pages
            continue
        tier = next((name for tier, name in _NEAREST if tiers & (1 << tier)), "pool")
        loads[tier] = loads.get(tier, 0) + pages
    return Held(device, loads)


def _held_snapshots(own: _Segments, usable: int) -> Held:
    """Return `held_pages` of a model without attention, of whose snapshots the last is used.

    What is usable and not on the device comes from where the last one is, the pages before with it.
    """
    at = device = tiers = 0
    for mask, pages in own:
        at += pages
        if at <= usable:
            tiers = part_tiers(mask, Part.STATE)
            device = at if tiers & _DEVICE else device
    if device == usable:
        return Held(device, {})
    tier = next((name for tier, name in _NEAREST if tiers & (1 << tier)), "pool")
    return Held(device, {tier: usable - device})


def in_the_making(held: Held, pages: int) -> Held:
    """Return `held` where the first `pages` pages are being computed or loaded already."""
    if pages <= held.device_pages:
        return held
    loads: dict[str, int] = {}
    gone = pages - held.device_pages
    for tier, count in held.load_pages.items():
        left = max(0, count - gone)
        gone -= count - left
        if left:
            loads[tier] = left
    return Held(pages, loads)


def _segments(run: Sequence[PartMask]) -> _Segments:
    """Return a run compressed."""
    if isinstance(run, MaskRun):
        return run.segments
    return [(mask, 1) for mask in run]


def _merge(first: _Segments, second: _Segments) -> Iterator[tuple[PartMask, PartMask, int]]:
    """Yield both runs side by side; where one has ended, its mask is 0."""
    left, right = _spent(first), _spent(second)
    a, a_pages = next(left)
    b, b_pages = next(right)
    none = PartMask(0)
    while a_pages or b_pages:
        pages = min(a_pages or b_pages, b_pages or a_pages)
        yield (a if a_pages else none), (b if b_pages else none), pages
        if a_pages:
            a_pages -= pages
            if not a_pages:
                a, a_pages = next(left)
        if b_pages:
            b_pages -= pages
            if not b_pages:
                b, b_pages = next(right)


def _spent(segments: Iterable[tuple[PartMask, int]]) -> Iterator[tuple[PartMask, int]]:
    """Yield segments, then empty ones for ever."""
    yield from segments
    while True:
        yield PartMask(0), 0

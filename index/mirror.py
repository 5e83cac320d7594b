"""The page index in memory.

Covers which places are up, what they hold, and the order of their events; pure, no I/O. Does not
cover where events come from (`pie.index.feed`) or how masks are kept (`pie.index.lanes`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pie.index.contract import IndexMode, PlaceRecord
from pie.index.lanes import Lane, Lanes
from pie.index.runs import MaskRun
from pie.page.events import (
    Epoch,
    PageEvent,
    PageRemoved,
    PageStored,
    Part,
    PartMask,
    PlaceId,
    Tier,
    entry_masks,
    part_bit,
)
from pie.page.key import PageKey

_FIRST_LOOK = 64
"""Keys looked up at first; every further look is twice as long. Most prompts end early."""

LaneNumbers: TypeAlias = npt.NDArray[np.int64]
"""Lanes of places that hold alike."""

_TIER_MASKS = {tier: sum(part_bit(part, tier) for part in Part) for tier in Tier}


class Applied(enum.Enum):
    """What became of an event."""

    DONE = "done"
    OLD = "old"
    """Known already, or from an earlier start of the place: nothing changed."""
    GAP = "gap"
    """Events before it are missing: nothing changed, the place must be read anew."""
    UNKNOWN = "unknown"
    """The place is not up in this epoch: nothing changed."""


@dataclass(slots=True)
class _Place:
    record: PlaceRecord
    lane: Lane
    seq: int
    """The latest event that the lane has."""


class _Up:
    """The places that are up, and what of them is looked at for every prompt: made anew after a change."""

    def __init__(self) -> None:
        self._places: dict[PlaceId, _Place] = {}
        self._records: Mapping[PlaceId, PlaceRecord] | None = None
        self._sparse: Mapping[PlaceId, Lane] | None = None
        self._lanes: Mapping[PlaceId, Lane] | None = None

    def get(self, place: PlaceId) -> _Place | None:
        """Return a place; None where it is not up."""
        return self._places.get(place)

    def all(self) -> Iterable[_Place]:
        """Return all of them."""
        return self._places.values()

    def put(self, up: _Place) -> None:
        """Let a place be up, in the stead of an earlier start of it."""
        self.changed()
        self._places[up.record.place] = up

    def drop(self, place: PlaceId) -> None:
        """Let a place that is up be so no more."""
        self.changed()
        del self._places[place]

    def changed(self) -> None:
        """Learn that a record or a lane is another one."""
        self._records = self._sparse = self._lanes = None

    def records(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places' records; what was returned before stays as it was."""
        if self._records is None:
            self._records = MappingProxyType({up.record.place: up.record for up in self.all()})
        return self._records

    def sparse(self) -> Mapping[PlaceId, Lane]:
        """Return those that have states alone."""
        if self._sparse is None:
            self._sparse = {
                up.record.place: up.lane for up in self.all() if up.record.has_states_alone
            }
        return self._sparse

    def lanes(self) -> Mapping[PlaceId, Lane]:
        """Return the lane of each place; another mapping after a change."""
        if self._lanes is None:
            self._lanes = {up.record.place: up.lane for up in self.all()}
        return self._lanes

    def check(self) -> None:
        """Assert that what is kept is of now."""
        assert all(place == up.record.place for place, up in self._places.items())
        before = self.records(), self.sparse(), self.lanes()
        self.changed()
        assert before == (self.records(), self.sparse(), self.lanes())


class Mirror:
    """Who holds which page, as far as known; an `IndexReader`. Not thread-safe, does no I/O."""

    mode: IndexMode
    """Set by whoever feeds the mirror; `OK` at first."""

    def __init__(self) -> None:
        self.mode = IndexMode.OK
        self._lanes = Lanes()
        self._up = _Up()

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are up; nobody changes that."""
        return self._up.records()

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, MaskRun]:
        """Return, for every place that holds `keys[0]`, the masks of its leading run.

        A run ends before the first key that the place does not hold in any part; for places that
        have states alone see `IndexReader.matches`. A `MaskRun` is a sequence of masks;
        `MaskRun.segments` gives the same compressed, `[(mask, pages), ...]`, which is far cheaper to
        walk than one mask at a time.
        """
        sparse = self._up.sparse()
        found = self._leading(keys)
        if sparse:
            found = {place: run for place, run in found.items() if place not in sparse}
            found |= self._snapshots(keys, sparse)
        return found

    def lanes(self) -> Mapping[PlaceId, Lane]:
        """Return the number that `alike` knows each place by; another mapping once one has changed."""
        return self._up.lanes()

    def alike(self, keys: Sequence[PageKey]) -> list[tuple[MaskRun, LaneNumbers]] | None:
        """Return what `matches` does, with the lanes of all places that hold alike together.

        At a thousand places that all hold a prompt's first page this takes a tenth of the time. None where a
        place has states alone.
        """
        if self._up.sparse():
            return None
        found: list[tuple[MaskRun, LaneNumbers]] = []
        going: list[tuple[LaneNumbers, list[tuple[PartMask, int]]]] = []
        start, length = 0, _FIRST_LOOK
        while start < len(keys):
            for state, group in groupby(self._lanes.states(keys[start : start + length])):
                pages = sum(1 for _ in group)
                if not start and not going and not found:
                    going = self._first(state)
                ended = state is None
                masks = None if state is None else self._lanes.by_lane(state)
                longer: list[tuple[LaneNumbers, list[tuple[PartMask, int]]]] = []
                for lanes, run in going:
                    if masks is None:
                        found.append((MaskRun(tuple(run)), lanes))
                        continue
                    for mask, some in _by_mask(masks[lanes], lanes):
                        if not mask:
                            found.append((MaskRun(tuple(run)), some))
                        elif run and run[-1][0] == mask:
                            longer.append((some, [*run[:-1], (mask, run[-1][1] + pages)]))
                        else:
                            longer.append((some, [*run, (mask, pages)]))
                going = longer
                if ended or not going:
                    return found
            start, length = start + length, 2 * length
        return found + [(MaskRun(tuple(run)), lanes) for lanes, run in going]

    def _first(self, state: int | None) -> list[tuple[LaneNumbers, list[tuple[PartMask, int]]]]:
        """Return the places that have something in a state, with empty runs."""
        if state is None:
            return []
        lanes = np.flatnonzero(self._lanes.by_lane(state))
        up = self._up.lanes()
        # A lane that was closed, or is filled beside the place's own, is nobody's.
        if self._lanes.width > len(up):
            lanes = np.intersect1d(lanes, np.fromiter(up.values(), np.int64, len(up)))
        return [(lanes, [])] if len(lanes) else []

    def _leading(self, keys: Sequence[PageKey]) -> dict[PlaceId, MaskRun]:
        first = self._lanes.states(keys[:1])
        if not first or first[0] is None:
            return {}
        masks = self._lanes.unpack(first[0])
        runs: dict[PlaceId, list[tuple[PartMask, int]]] = {}
        going: list[tuple[Lane, list[tuple[PartMask, int]]]] = []
        for up in self._up.all():
            if masks[up.lane]:
                run = runs[up.record.place] = []
                going.append((up.lane, run))
        start, length = 0, _FIRST_LOOK
        while going and start < len(keys):
            going = self._extend(going, self._lanes.states(keys[start : start + length]))
            start, length = start + length, 2 * length
        return {place: MaskRun(tuple(run)) for place, run in runs.items()}

    def _snapshots(
        self, keys: Sequence[PageKey], lanes: Mapping[PlaceId, Lane]
    ) -> dict[PlaceId, MaskRun]:
        """Return what places that have states alone hold of `keys`, up to the last such key."""
        runs: dict[PlaceId, list[tuple[PartMask, int]]] = {place: [] for place in lanes}
        at = 0
        for state, group in groupby(self._lanes.states(keys)):
            pages = sum(1 for _ in group)
            masks = self._lanes.unpack(state) if state is not None else ()
            for place, lane in lanes.items():
                mask = PartMask(masks[lane]) if masks else PartMask(0)
                if not mask:
                    continue
                run = runs[place]
                gap = at - sum(length for _, length in run)
                if gap:
                    run.append((PartMask(0), gap))
                if run and run[-1][0] == mask:
                    run[-1] = (mask, run[-1][1] + pages)
                else:
                    run.append((mask, pages))
            at += pages
        return {place: MaskRun(tuple(run)) for place, run in runs.items() if run}

    def place_up(self, record: PlaceRecord, *, seq: int = 0) -> bool:
        """Add an empty place, or replace the record of one that is up in the same epoch.

        A later epoch empties the place. Returns False, changing nothing, for an earlier one.
        """
        up = self._up.get(record.place)
        if up is not None:
            if record.epoch < up.record.epoch:
                return False
            if record.epoch == up.record.epoch:
                up.record = record
                self._up.changed()
                return True
            self._lanes.close(up.lane)
        self._up.put(_Place(record, self._lanes.open(), seq))
        return True

    def place_down(self, place: PlaceId, epoch: Epoch | None = None) -> bool:
        """Forget a place and all it holds, unless it is up in a later epoch than `epoch`."""
        up = self._up.get(place)
        if up is None or (epoch is not None and epoch < up.record.epoch):
            return False
        self._up.drop(place)
        self._lanes.close(up.lane)
        return True

    def load(self, record: PlaceRecord, *, seq: int) -> PlaceLoad:
        """Begin to read a place anew, beside what is known of it, which holds until `commit`.

        `seq` is the latest event that what is read is sure to contain.
        """
        return PlaceLoad(self._up, self._lanes, record, seq)

    def apply(self, event: PageEvent) -> Applied:
        """Take in the next event of a place."""
        up = self._up.get(event.place)
        if up is None or event.epoch > up.record.epoch:
            return Applied.UNKNOWN
        if event.epoch < up.record.epoch:
            return Applied.OLD
        applied = _apply(self._lanes, up, event)
        if not isinstance(event, PageStored | PageRemoved):
            self._up.changed()
        return applied

    def epoch(self, place: PlaceId) -> Epoch | None:
        """Return the epoch in which a place is up."""
        up = self._up.get(place)
        return up.record.epoch if up is not None else None

    def pages(self, place: PlaceId) -> Mapping[Tier, int]:
        """Return how many page parts a place holds in each tier; nothing for a place not up."""
        up = self._up.get(place)
        return tier_counts(self._lanes.counts(up.lane)) if up is not None else {}

    def masks(self, place: PlaceId) -> dict[PageKey, PartMask]:
        """Return all that a place holds; slow, for tools and tests."""
        up = self._up.get(place)
        return self._lanes.masks(up.lane) if up is not None else {}

    def tidy(self, steps: int = 2_000) -> bool:
        """Do a bounded part of the cleaning left over from places that went; say whether more is left."""
        return self._lanes.tidy(steps)

    def check(self) -> None:
        """Assert that the mirror agrees with itself; slow, for tests."""
        self._lanes.check()
        self._up.check()
        lanes = [up.lane for up in self._up.all()]
        assert len(set(lanes)) == len(lanes)

    def _extend(
        self, going: list[tuple[Lane, list[tuple[PartMask, int]]]], states: list[int | None]
    ) -> list[tuple[Lane, list[tuple[PartMask, int]]]]:
        """Lengthen the runs by pages in these states; return the runs that go on after them."""
        unpacked: dict[int, tuple[int, ...]] = {}
        for state, group in groupby(states):
            if state is None:
                return []
            pages = sum(1 for _ in group)
            masks = unpacked.get(state)
            if masks is None:
                masks = unpacked[state] = self._lanes.unpack(state)
            ended = False
            for lane, run in going:
                mask = masks[lane]
                if not mask:
                    ended = True
                elif run and run[-1][0] == mask:
                    run[-1] = (PartMask(mask), run[-1][1] + pages)
                else:
                    run.append((PartMask(mask), pages))
            if ended:
                going = [(lane, run) for lane, run in going if masks[lane]]
                if not going:
                    return going
        return going


class PlaceLoad:
    """A place that is being read anew. Ends with `commit` or `discard`, both at most once."""

    def __init__(self, up: _Up, lanes: Lanes, record: PlaceRecord, seq: int) -> None:
        self._up = up
        self._lanes = lanes
        self._place = _Place(record, lanes.open(), seq)
        self._closed = False

    @property
    def seq(self) -> int:
        """The latest event that was taken in."""
        return self._place.seq

    def put(self, masks: Iterable[tuple[PageKey, PartMask]]) -> None:
        """Add pages as they are read; a page that comes twice counts once."""
        self._lanes.change(self._place.lane, masks, stored=True)

    def apply(self, event: PageEvent) -> Applied:
        """Take in the next event of the place."""
        if event.epoch != self._place.record.epoch or event.place != self._place.record.place:
            return Applied.UNKNOWN
        return _apply(self._lanes, self._place, event)

    def commit(self) -> bool:
        """Let what was read take the place of what was known, in one step.

        Returns False, and discards, where the place is up in a later epoch meanwhile.
        """
        record = self._place.record
        up = self._up.get(record.place)
        if up is not None and up.record.epoch > record.epoch:
            self.discard()
            return False
        if up is not None:
            self._lanes.close(up.lane)
        self._up.put(self._place)
        self._closed = True
        return True

    def discard(self) -> None:
        """Forget what was read; harmless after `commit`."""
        if not self._closed:
            self._lanes.close(self._place.lane)
            self._closed = True


def _by_mask(
    masks: npt.NDArray[np.uint32], lanes: LaneNumbers
) -> Iterator[tuple[PartMask, LaneNumbers]]:
    """Yield each mask with the lanes that have it."""
    first = masks[0]
    same = masks == first
    if same.all():
        yield PartMask(int(first)), lanes
        return
    for mask in np.unique(masks):
        yield PartMask(int(mask)), lanes[masks == mask]


def tier_counts(counts: Mapping[PartMask, int]) -> dict[Tier, int]:
    """Return how many page parts lie in each tier, from how many pages have which mask."""
    tiers: dict[Tier, int] = {}
    for mask, pages in counts.items():
        for tier in Tier:
            parts = (mask & _TIER_MASKS[tier]).bit_count()
            if parts:
                tiers[tier] = tiers.get(tier, 0) + parts * pages
    return tiers


def _apply(lanes: Lanes, place: _Place, event: PageEvent) -> Applied:
    """Take in an event of the right place and epoch, unless it is not the next one."""
    if event.seq <= place.seq:
        return Applied.OLD
    if event.seq != place.seq + 1:
        return Applied.GAP
    if isinstance(event, PageStored | PageRemoved):
        stored = isinstance(event, PageStored)
        lanes.change(place.lane, entry_masks(event.entries), stored=stored)
    else:
        lanes.close(place.lane)
        place.lane = lanes.open()
    place.seq = event.seq
    return Applied.DONE

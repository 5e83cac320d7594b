"""Masks of all pages at all places, by key.

Covers the mirror's data. Does not cover places, epochs and order of events (`pie.index.mirror`).

A page's key maps to one integer that has a lane of 32 bits for each place, its `PartMask` there.
Pages of one prefix are mostly held alike, so equal integers are one object, and neighbours compare
in a step, whatever the number of places. A million pages at 64 places cost dictionaries and
their keys; reading a prefix costs one look-up a page, not one a page and place. Keys are spread over
dictionaries by their first byte: none is so large that growing it, or listing its keys, takes a millisecond.
Measurements are in `docs/design/0003-index-mirror.md`.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from pie.page.events import PartMask
from pie.page.key import PageKey

Lane = NewType("Lane", int)
"""Where a place's masks lie in every integer. A lane is given to one snapshot of one place."""

MASK_BITS = 32
"""What a place's mask of a page has room in."""
_LANE_MASK = (1 << MASK_BITS) - 1

MasksByLane: TypeAlias = npt.NDArray[np.uint32]
"""A state as an array; nobody writes to it."""

_ARRAYS_LIMIT = 1_024
"""States kept as arrays: one that many pages have is asked for with every prompt."""

_STATES_LIMIT = 65_536
"""Integers kept for sharing. Beyond, they are forgotten and gathered anew: sharing saves memory and
time, and nothing depends on it."""


class Lanes:
    """The masks of pages by lane. Everything is constant time, or bounded steps, or says that it is slow."""

    def __init__(self) -> None:
        self._held: list[dict[PageKey, int]] = [{} for _ in range(256)]
        """By the first byte of their keys."""
        self._states: dict[int, int] = {}
        self._arrays: dict[int, MasksByLane] = {}
        self._counts: dict[Lane, dict[PartMask, int]] = {}
        self._free: list[Lane] = []
        self._dirty: list[Lane] = []
        self._cleaning: list[Lane] = []
        self._to_clean: Iterator[tuple[dict[PageKey, int], PageKey]] = iter(())
        self._format = struct.Struct("<0I")

    def __len__(self) -> int:
        """Return the number of keys, those that only wait for cleaning included."""
        return sum(map(len, self._held))

    @property
    def width(self) -> int:
        """How many lanes there are, free ones among them."""
        return self._format.size * 8 // MASK_BITS

    def open(self) -> Lane:
        """Return an empty lane."""
        if self._free:
            lane = heapq.heappop(self._free)
        else:
            lane = Lane(self._format.size * 8 // MASK_BITS)
            self._format = struct.Struct(f"<{lane + 1}I")
        self._counts[lane] = {}
        return lane

    def close(self, lane: Lane) -> None:
        """Give a lane back. What it holds is cleaned up by `tidy`; until then the lane is not used."""
        if self._counts.pop(lane):
            self._dirty.append(lane)
        else:
            heapq.heappush(self._free, lane)

    def change(
        self, lane: Lane, changes: Iterable[tuple[PageKey, PartMask]], *, stored: bool
    ) -> None:
        """Add masks to what the lane holds of pages, or take them away."""
        parts, states, counts = self._held, self._states, self._counts[lane]
        shift = lane * MASK_BITS
        before: int | None = None
        old = new = after = 0
        last = PartMask(0)
        for key, mask in changes:
            held = parts[key[0]]
            state = held.get(key, 0)
            # Neighbours are mostly held alike, and at a thousand places each of these integers has 4 KiB.
            if state is not before or mask != last:
                before, last = state, mask
                old = (state >> shift) & _LANE_MASK
                new = old | mask if stored else old & ~mask
                after = state ^ ((old ^ new) << shift)
                if after:
                    after = states.setdefault(after, after)
            if new == old:
                continue
            if after:
                held[key] = after
            else:
                del held[key]
            if old:
                left = counts[PartMask(old)] - 1
                if left:
                    counts[PartMask(old)] = left
                else:
                    del counts[PartMask(old)]
            if new:
                counts[PartMask(new)] = counts.get(PartMask(new), 0) + 1
        if len(states) > _STATES_LIMIT:
            states.clear()

    def states(self, keys: Iterable[PageKey]) -> list[int | None]:
        """Return what is held of each page, one integer for all lanes; None where nothing is."""
        held = self._held
        return [held[key[0]].get(key) for key in keys]

    def unpack(self, state: int) -> tuple[int, ...]:
        """Return the masks in a state, by lane."""
        return self._format.unpack(state.to_bytes(self._format.size, "little"))

    def by_lane(self, state: int) -> MasksByLane:
        """Return the same as an array, which is cheaper where there are many lanes."""
        masks = self._arrays.get(state)
        if masks is None or len(masks) != self.width:
            if len(self._arrays) >= _ARRAYS_LIMIT:
                self._arrays.clear()
            masks = np.frombuffer(state.to_bytes(self._format.size, "little"), np.dtype("<u4"))
            self._arrays[state] = masks
        return masks

    def counts(self, lane: Lane) -> dict[PartMask, int]:
        """Return how many pages of a lane have which mask."""
        return dict(self._counts[lane])

    def masks(self, lane: Lane) -> dict[PageKey, PartMask]:
        """Return all that a lane holds; slow."""
        shift = lane * MASK_BITS
        items = (item for held in self._held for item in held.items())
        found = ((key, (state >> shift) & _LANE_MASK) for key, state in items)
        return {key: PartMask(mask) for key, mask in found if mask}

    def tidy(self, steps: int) -> bool:
        """Clean up to `steps` pages of lanes that were given back; say whether more is left."""
        if not self._cleaning:
            if not self._dirty:
                return False
            self._cleaning, self._dirty = self._dirty, []
            # A copy of some keys at a time: closed lanes get no new ones.
            self._to_clean = ((held, key) for held in self._held for key in list(held))
        dirt = sum(_LANE_MASK << (lane * MASK_BITS) for lane in self._cleaning)
        seen = 0
        for held, key in islice(self._to_clean, steps):
            seen += 1
            state = held.get(key)
            if state is None or not state & dirt:
                continue
            clean = state & ~dirt
            if clean:
                held[key] = self._states.setdefault(clean, clean)
            else:
                del held[key]
        if seen < steps:
            for lane in self._cleaning:
                heapq.heappush(self._free, lane)
            self._cleaning = []
            self._to_clean = iter(())
        return bool(self._cleaning or self._dirty)

    def check(self) -> None:
        """Assert that lanes agree with themselves; slow, for tests."""
        lanes = self._format.size * 8 // MASK_BITS
        parts = [list(self._counts), self._free, self._dirty, self._cleaning]
        assert sorted(lane for part in parts for lane in part) == list(range(lanes))
        counts: dict[Lane, dict[PartMask, int]] = {lane: {} for lane in self._counts}
        free = set(self._free)
        for state in (state for held in self._held for state in held.values()):
            assert state, "a key that nobody holds is kept"
            for position, mask in enumerate(self.unpack(state)):
                lane = Lane(position)
                if not mask:
                    continue
                assert lane not in free, "a free lane is not empty"
                if lane in counts:
                    counts[lane][PartMask(mask)] = counts[lane].get(PartMask(mask), 0) + 1
        assert counts == self._counts
        assert all(state == key for key, state in self._states.items())

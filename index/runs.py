"""A leading run of pages at one place, compressed.

Covers the sequence of masks that the mirror answers with. Does not cover how long a run can be
used (`pie.page.layout.usable_run`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import overload

from pie.page.events import PartMask


class MaskRun(Sequence[PartMask]):
    """The masks of consecutive pages. Most neighbours are held alike, so few segments say it all."""

    __slots__ = ("_length", "segments")

    segments: tuple[tuple[PartMask, int], ...]
    """Masks with the number of consecutive pages that have them; neighbours differ."""

    def __init__(self, segments: tuple[tuple[PartMask, int], ...]) -> None:
        self.segments = segments
        self._length = sum(pages for _, pages in segments)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> PartMask: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[PartMask]: ...
    def __getitem__(self, index: int | slice) -> PartMask | Sequence[PartMask]:
        if isinstance(index, slice):
            return list(self)[index]
        at = index + self._length if index < 0 else index
        if 0 <= at < self._length:
            for mask, pages in self.segments:
                if at < pages:
                    return mask
                at -= pages
        raise IndexError(index)

    def __iter__(self) -> Iterator[PartMask]:
        return chain.from_iterable(repeat(mask, pages) for mask, pages in self.segments)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, MaskRun):
            return self.segments == other.segments
        if isinstance(other, Sequence):
            return list(self) == list(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.segments)

    def __repr__(self) -> str:
        return f"MaskRun({self.segments!r})"

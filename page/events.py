"""Who holds which page, and what changed.

Covers the words that every place uses for tiers, parts and places, and the events that it
publishes. Does not cover how events travel (`pie.index`).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import NewType

import msgspec

from pie.page.key import PageKey

PlaceId = NewType("PlaceId", str)
"""The name of a worker or pool node, the same across its restarts."""

Epoch = NewType("Epoch", int)
"""A number that a place takes anew at every start; a later start has a larger one."""

PartMask = NewType("PartMask", int)
"""Which parts of a page a place holds in which tiers: a bit for each pair, see `part_bit`."""


class Part(enum.IntEnum):
    """What of a page is stored."""

    FULL = 0
    """Keys and values of the layers that attend to everything."""
    WINDOW = 1
    """Keys and values of sliding-window layers."""
    STATE = 2
    """A snapshot of recurrent layers at the page's end."""


class Tier(enum.IntEnum):
    """A kind of storage. Smaller is nearer to compute."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    POOL_RAM = 3
    POOL_DISK = 4
    POOL_OBJECT = 5


class PlaceKind(enum.StrEnum):
    """What a place is."""

    WORKER = "worker"
    POOL = "pool"


AnyKey = bytes
"""A page's key or a root."""

_TIERS = 8


def part_bit(part: Part, tier: Tier) -> PartMask:
    """Return the mask that says `part` is held in `tier` and nothing else."""
    return PartMask(1 << (part * _TIERS + tier))


def part_tiers(mask: PartMask, part: Part) -> int:
    """Return the tiers that hold `part`, a bit for each tier; 0 where none does."""
    return (mask >> (part * _TIERS)) & ((1 << _TIERS) - 1)


class PageEntry(msgspec.Struct, frozen=True, array_like=True):
    """One part of one page in one tier of a place."""

    key: PageKey
    # Not `bytes`: the field of that name below hides the type from those that read annotations.
    parent: AnyKey
    """The key before it in its sequence, or its root."""
    index: int
    """Its place in its sequence, counted in pages from 0."""
    part: Part
    tier: Tier
    bytes: int
    tenant_tag: str = ""


class PageStored(msgspec.Struct, frozen=True, tag="stored", array_like=True):
    """The place holds these entries from now on."""

    place: PlaceId
    epoch: Epoch
    seq: int
    entries: tuple[PageEntry, ...]


class PageRemoved(msgspec.Struct, frozen=True, tag="removed", array_like=True):
    """The place no longer holds these entries."""

    place: PlaceId
    epoch: Epoch
    seq: int
    entries: tuple[PageEntry, ...]


class PlaceCleared(msgspec.Struct, frozen=True, tag="cleared", array_like=True):
    """The place holds nothing any more."""

    place: PlaceId
    epoch: Epoch
    seq: int


PageEvent = PageStored | PageRemoved | PlaceCleared
"""Per place, `seq` counts from 1 without gaps within an epoch."""

_BITS = {(part, tier): part_bit(part, tier) for part in Part for tier in Tier}


def entry_masks(entries: Iterable[PageEntry]) -> Iterable[tuple[PageKey, PartMask]]:
    """Return key and mask of each entry."""
    # `part_bit` for each of millions of entries would double the time.
    return ((entry.key, _BITS[entry.part, entry.tier]) for entry in entries)

"""What the page index is: places publish what they hold, readers ask who holds a prefix.

Covers the records and both halves of the contract. `pie.index.conformance` is the suite that
every implementation passes. Does not cover Redis (`pie.index.publisher`, `pie.index.feed`) or the
mirror (`pie.index.mirror`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from pie.page.events import Epoch, PageEntry, Part, PartMask, PlaceId, PlaceKind
from pie.page.key import PageKey, RootKey


class PlaceRecord(msgspec.Struct, frozen=True):
    """What a place says of itself when it announces itself."""

    place: PlaceId
    epoch: Epoch
    kind: PlaceKind
    address: str
    """Wire address, such as `tcp://127.0.0.1:40123` or `ipc:///run/pie/w0`."""
    model_root: RootKey | None = None
    """None for a pool node, which holds pages of any model."""
    model_name: str = ""
    dtype: str = ""
    layout_id: str = ""
    page_tokens: int = 0
    context_tokens: int = 0
    """Most tokens of prompt and output together."""
    vocab_size: int = 0
    eos_token_ids: tuple[int, ...] = ()
    tokenizer_path: str = ""
    """Folder that holds `tokenizer.json` and the chat template, where the router shares it."""
    tokenizer_digest: str = ""
    """Digest of tokenizer and template files; a router must load the same ones."""
    window_tokens: int = 0
    parts: tuple[int, ...] = (0,)
    tiers: tuple[int, ...] = (0,)
    total_pages: int = 0
    page_bytes: int = 0
    """The size of a worker's page in device memory."""
    capacity_bytes: int = 0
    """What a pool node's own tiers hold together: its share of the pages."""
    draining: bool = False
    """Whether it takes nothing more and hands the pages that it has to others."""
    copies: int = 1
    """How many pool nodes keep a page, as this one's configuration says."""
    takes_programs: bool = False
    """Whether a worker runs users' programs for routers."""
    settled: str = ""
    """Of a pool node: among which nodes it has handed on all pages that belong to others
    (`pie.pool.placement.view_of`)."""
    ttl_s: float = 5.0
    """The place is gone when it has not been heard of for so long."""

    @property
    def has_states_alone(self) -> bool:
        """Whether its model has no attention, so that only some pages, with a snapshot, are held."""
        return self.parts == (int(Part.STATE),)


class IndexMode(enum.StrEnum):
    """How well the index can be trusted now."""

    OK = "ok"
    DEGRADED = "degraded"
    """Redis cannot be reached; the mirror goes on with what it knows."""
    RESYNCING = "resyncing"
    """Reading places anew; answers may miss pages."""


class IndexWriter(Protocol):
    """What a place publishes through. Calls return at once; sending goes on behind them."""

    def stored(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place holds these entries from now on."""

    def removed(self, entries: Sequence[PageEntry]) -> None:
        """Say that the place no longer holds these entries."""


class IndexReader(Protocol):
    """What routers, workers and tools read through. Answers are hints and may be stale."""

    @property
    def mode(self) -> IndexMode:
        """How well answers can be trusted now."""
        ...

    def places(self) -> Mapping[PlaceId, PlaceRecord]:
        """Return the places that are alive."""
        ...

    def matches(self, keys: Sequence[PageKey]) -> Mapping[PlaceId, Sequence[PartMask]]:
        """Return, for every place that holds `keys[0]`, the masks of its leading run.

        A run ends before the first key that the place does not hold in any part. A place that has
        states alone needs no page before a snapshot: its run goes on, with 0 for what is not held,
        to the last key that it holds.
        """
        ...

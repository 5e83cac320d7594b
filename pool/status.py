"""What a pool node says of itself.

Covers the numbers that tools and metrics show. Does not cover how they are shown (`pie.cluster`).
"""

from __future__ import annotations

import msgspec


class PoolStatus(msgspec.Struct, frozen=True):
    """One node's numbers. Counts are since the start."""

    place: str
    epoch: int
    address: str
    index_mode: str
    draining: bool
    used_bytes: int
    budget_bytes: int
    pages: dict[str, int]
    """Readable pages by tier."""
    claims: int
    """Pages that writers have announced and not yet sent."""
    loans: int
    """Pages that are being sent."""
    hits: int
    misses: int
    pending: int
    stored: int
    evicted: int
    demoted: int
    no_room: int
    """Stores refused because nothing could leave."""
    bad_pages: dict[str, int]
    """Pages that did not match their checksum, by reason: `at_store`, `at_load`, `malformed`."""
    sent_bytes: int
    received_bytes: int

"""What a pool node says of itself.

Covers the numbers that tools and metrics show. Does not cover how they are shown
(`pie.cluster`, `pie.router`).
"""

from __future__ import annotations

import msgspec

from pie.wire.figures import Counter, Gauge


class PoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node's numbers. Counts are since the start."""

    place: str
    epoch: int
    address: str
    index_mode: str
    draining: bool
    used_bytes: Gauge[int]
    budget_bytes: Gauge[int]
    pages: Gauge[dict[str, int]]
    """Readable pages by tier."""
    claims: Gauge[int]
    """Pages that writers have announced and not yet sent."""
    loans: Gauge[int]
    """Pages that are being sent."""
    hits: Counter[int]
    misses: Counter[int]
    pending: Counter[int]
    stored: Counter[int]
    evicted: Counter[int]
    demoted: Counter[int]
    no_room: Counter[int]
    """Stores refused because nothing could leave."""
    policy_failures: Counter[int]
    """Calls in which the retention policy raised; `lru` decided instead."""
    bad_pages: Counter[dict[str, int]]
    """Pages that did not match their checksum, by reason: `at_store`, `at_load`, `malformed`."""
    sent_bytes: Counter[int]
    received_bytes: Counter[int]

"""What a worker counts.

Covers the numbers behind `pie status` and `/metrics`. Does not cover where they are shown
(`pie.cluster`, `pie.router`).
"""

from __future__ import annotations

import msgspec


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges as they are now."""

    state: str
    """`starting`, `serving`, `draining` or `closed`."""

    # Gauges
    running: int = 0
    waiting: int = 0
    loading: int = 0
    """Sequences that wait for pages from the pool; counted in `waiting` too."""
    waiting_tokens: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_writable: int = 0
    pages_idle: int = 0
    """Frozen pages that no sequence uses; kept until room is needed."""
    pages_in_use: int = 0
    """Frozen pages that a sequence uses."""
    pages_loading: int = 0
    store_queue_pages: int = 0
    """Pages that wait to be stored in the pool."""
    prefill_tokens_per_s: float = 0.0
    load_tokens_per_s: float = 0.0
    step_ms: float = 0.0

    # Counters
    steps: int = 0
    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_pool: int = 0
    pages_stored: int = 0
    """Pages that a pool node took from here."""
    pages_store_dropped: int = 0
    """Pages that were not offered to the pool: the queue was full, or the store failed."""
    pages_loaded: int = 0
    loads_missed: int = 0
    """Loads that brought nothing."""
    loads_skipped: int = 0
    """Loads that were not tried because computing was measured to be faster."""

"""What a worker counts.

Covers the numbers behind `pie status` and `/metrics`. Does not cover where they are shown
(`pie.cluster`, `pie.router`).
"""

from __future__ import annotations

import msgspec

from pie.wire.figures import Counter, Gauge


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and gauges as they are now."""

    state: str
    """`starting`, `serving`, `draining` or `closed`."""

    running: Gauge[int] = 0
    waiting: Gauge[int] = 0
    loading: Gauge[int] = 0
    """Sequences that wait for pages from the pool; counted in `waiting` too."""
    waiting_tokens: Gauge[int] = 0
    pages: Gauge[int] = 0
    pages_free: Gauge[int] = 0
    pages_writable: Gauge[int] = 0
    pages_idle: Gauge[int] = 0
    """Frozen pages that no sequence uses; kept until room is needed."""
    pages_in_use: Gauge[int] = 0
    """Frozen pages that a sequence uses."""
    pages_loading: Gauge[int] = 0
    state_slots: Gauge[int] = 0
    """Room for recurrent states, each of one sequence; 0 where the model has none."""
    state_slots_free: Gauge[int] = 0
    state_slots_running: Gauge[int] = 0
    """State slots that running sequences write."""
    snapshots_idle: Gauge[int] = 0
    """Snapshots of recurrent states that no sequence uses; kept until room is needed."""
    snapshots_in_use: Gauge[int] = 0
    store_queue_pages: Gauge[int] = 0
    """Pages that wait to be stored in the pool."""
    prefill_tokens_per_s: Gauge[float] = 0.0
    load_tokens_per_s: Gauge[float] = 0.0
    step_ms: Gauge[float] = 0.0

    steps: Counter[int] = 0
    requests: Counter[int] = 0
    finished: Counter[int] = 0
    failed: Counter[int] = 0
    cancelled: Counter[int] = 0
    refused: Counter[int] = 0
    preemptions: Counter[int] = 0
    prefill_tokens: Counter[int] = 0
    prefill_tokens_shared_in_flight: Counter[int] = 0
    """Prompt tokens that were not computed because another request was computing them."""
    decode_tokens: Counter[int] = 0
    cached_tokens_device: Counter[int] = 0
    cached_tokens_pool: Counter[int] = 0
    snapshots_taken: Counter[int] = 0
    snapshots_skipped: Counter[int] = 0
    """Snapshots that were due and for which there was no state slot."""
    pages_stored: Counter[int] = 0
    """Pages that a pool node took from here."""
    pages_store_dropped: Counter[int] = 0
    """Pages that were not offered to the pool: the queue was full, or the store failed."""
    pages_loaded: Counter[int] = 0
    loads_missed: Counter[int] = 0
    """Loads that brought nothing."""
    loads_skipped: Counter[int] = 0
    """Loads that were not tried: computing is faster, or the pool did not answer a moment ago."""

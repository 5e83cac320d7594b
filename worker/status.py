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

    policy_version: Gauge[int] = 0
    """The version of the policies that is in force here; 0 where none was applied."""
    policy_refused: Gauge[int] = 0
    """The version that could not be taken on; 0 where there is none."""
    policy_failing: Gauge[dict[str, int]] = {}
    """Of the retention policies in force: `failures`, `fallbacks`, and `unknown` proposals, each as the counters below."""
    running: Gauge[int] = 0
    waiting: Gauge[int] = 0
    loading: Gauge[int] = 0
    """Sequences that wait for pages from a lower tier or the pool; counted in `waiting` too."""
    awaiting: Gauge[int] = 0
    """Requests that wait for pages which another worker is computing, and are not in `waiting` yet."""
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
    """Pages that wait to be copied to lower tiers and the pool."""
    suspended_bytes: Gauge[int] = 0
    """Host memory that the last pages of sequences take that had to yield."""
    tier_pages: Gauge[dict[str, int]] = {}
    """Parts of pages in `host` and `disk`."""
    tier_used_bytes: Gauge[dict[str, int]] = {}
    tier_budget_bytes: Gauge[dict[str, int]] = {}
    disk_folders: Gauge[dict[str, int]] = {}
    """The folder of the disk tier by state: `ok`, `read_only` (gives pages and takes none), `off`."""
    prefill_tokens_per_s: Gauge[float] = 0.0
    load_tokens_per_s: Gauge[dict[str, int]] = {}
    """By the tier that pages come from; 0 where nothing was loaded yet."""
    step_ms: Gauge[float] = 0.0

    policy_failures: Counter[int] = 0
    """Calls in which the retention policy raised or did not answer in time, in any tier; `lru` decided instead."""
    policy_fallbacks: Counter[int] = 0
    """Answers that `lru` completed, because the retention policy failed or proposed too little."""
    policy_proposals_refused: Counter[dict[str, int]] = {}
    """Proposals of the retention policy that were passed over, by reason: `pinned`, which is in use, and `unknown`, which is
    no page that is there, or one that was proposed before."""
    steps: Counter[int] = 0
    requests: Counter[int] = 0
    finished: Counter[int] = 0
    failed: Counter[int] = 0
    cancelled: Counter[int] = 0
    refused: Counter[int] = 0
    preemptions: Counter[int] = 0
    """Sequences that had to yield."""
    suspended: Counter[int] = 0
    """Of them, those of which all that they had computed was kept."""
    resumed: Counter[int] = 0
    """Of these, those that went on from there."""
    prefill_tokens: Counter[int] = 0
    prefill_tokens_shared_in_flight: Counter[int] = 0
    """Prompt tokens that were not computed because another request was computing them."""
    awaited: Counter[int] = 0
    """Requests that waited for pages which another worker computed, and got them."""
    awaited_in_vain: Counter[int] = 0
    """Requests that waited for such pages, and went on without."""
    decode_tokens: Counter[int] = 0
    forks: Counter[int] = 0
    """Sequences that went on from another's prompt without computing a token of it."""
    cached_tokens_device: Counter[int] = 0
    cached_tokens_host: Counter[int] = 0
    cached_tokens_disk: Counter[int] = 0
    cached_tokens_pool: Counter[int] = 0
    snapshots_taken: Counter[int] = 0
    snapshots_skipped: Counter[int] = 0
    """Snapshots that were due and for which there was no state slot."""
    pages_stored: Counter[int] = 0
    """Pages that a pool node took from here."""
    pages_store_dropped: Counter[int] = 0
    """Pages that the pool did not take, or a lower tier where there is none: the queue was full,
    they had left, or the store failed."""
    pages_written_behind: Counter[int] = 0
    """Pages that were copied to a lower tier before they had to leave device memory."""
    pages_copied_late: Counter[int] = 0
    """Pages that were copied to host memory when they had to leave."""
    pages_evicted: Counter[int] = 0
    """Pages, and a recurrent model's snapshots, that left device memory for others, whether or not they are elsewhere."""
    pages_lost: Counter[int] = 0
    """Of them, those that left for nowhere: no lower tier had room, or there is none, and they are none of the last 65,536 that
    the pool took or gave."""
    pages_demoted: Counter[int] = 0
    """Parts of pages that host memory handed down to disk."""
    pages_promoted: Counter[int] = 0
    """Parts of pages that were used on disk and copied to host memory."""
    pages_tier_evicted: Counter[int] = 0
    """Parts of pages that left a lower tier."""
    tier_bad_pages: Counter[dict[str, int]] = {}
    """Parts of pages in lower tiers that did not match their checksum."""
    disk_errors: Counter[dict[str, int]] = {}
    """What the disk refused, by reason, such as `no_space`, `read_only`, `io`."""
    disk_bad_pages: Counter[dict[str, int]] = {}
    """Pages on disk that were damaged, gone or another model's, by reason."""
    disk_raw_bytes: Counter[int] = 0
    """Payloads that were written to disk, as they came."""
    disk_packed_bytes: Counter[int] = 0
    """The same payloads, as they were written."""
    disk_opened_bytes: Counter[int] = 0
    """Payloads that were read from disk, as they were given out."""
    disk_packed_pages: Counter[dict[str, int]] = {}
    """Pages that were written to disk, by the codec that they were packed with."""
    disk_seal_s: Counter[float] = 0.0
    """Spent on packing and encrypting what goes to disk."""
    disk_open_s: Counter[float] = 0.0
    """Spent on decrypting, unpacking and checking what comes from disk."""
    disk_locked_pages: Counter[int] = 0
    """Pages on disk that were found encrypted with a key that is not here."""
    pages_loaded: Counter[dict[str, int]] = {}
    """By the tier that they came from."""
    pages_prefetched: Counter[int] = 0
    """Pages that were brought from the pool into host memory for requests that waited in the queue."""
    pages_ordered_stored: Counter[int] = 0
    """Pages that the pool took because a cluster policy ordered it, or because this worker leaves."""
    pages_ordered_fetched: Counter[int] = 0
    """Pages that were brought into host memory because a cluster policy ordered it."""
    pages_ordered_let_go: Counter[int] = 0
    """Pages that left because a cluster policy ordered it."""
    pages_ordered_left: Counter[int] = 0
    """Pages that an order was about and that stayed as they were."""
    orders_refused: Counter[int] = 0
    """Orders that came while too many waited, or about too many pages."""
    loads_missed: Counter[int] = 0
    """Loads that brought nothing to a request that still wanted it."""
    loads_overran: Counter[int] = 0
    """Loads that were given up for computing, because they took longer than estimated."""
    loads_skipped: Counter[int] = 0
    """Loads that were not tried: computing is faster, or a tier did not answer a moment ago."""

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
    policy_version: Gauge[int]
    """The version of the policies that is in force here; 0 where none was applied."""
    policy_refused: Gauge[int]
    """The version that could not be taken on; 0 where there is none."""
    policy_failing: Gauge[dict[str, int]]
    """Of the retention policies in force: `failures`, `fallbacks`, and `unknown` proposals, each as the counters below."""
    used_bytes: Gauge[int]
    budget_bytes: Gauge[int]
    pages: Gauge[dict[str, int]]
    """Readable pages by tier."""
    tier_used_bytes: Gauge[dict[str, int]]
    tier_budget_bytes: Gauge[dict[str, int]]
    disk_folders: Gauge[dict[str, int]]
    """Folders of the disk tier by state: `ok`, `read_only` (they give pages and take none), `off`."""
    claims: Gauge[int]
    """Pages that writers have announced and not yet sent."""
    loans: Gauge[int]
    """Pages that are being sent."""
    pinned_pages: Gauge[int]
    """Pages that stay in RAM because somebody asked for it."""
    pinned_bytes: Gauge[int]
    hits: Counter[int]
    misses: Counter[int]
    pending: Counter[int]
    stored: Counter[int]
    evicted: Counter[int]
    demoted: Counter[int]
    promoted: Counter[int]
    """Pages that were used in a lower tier and copied to RAM."""
    no_room: Counter[int]
    """Stores refused because nothing could leave."""
    policy_failures: Counter[int]
    """Calls in which the retention policy raised or did not answer in time; `lru` decided instead."""
    policy_fallbacks: Counter[int]
    """Answers that `lru` completed, because the retention policy failed or proposed too little."""
    policy_proposals_refused: Counter[dict[str, int]]
    """Proposals of the retention policy that were passed over, by reason: `pinned`, which is in use, and `unknown`, which is
    no page that is there, or one that was proposed before."""
    bad_pages: Counter[dict[str, int]]
    """Pages that did not match their checksum, by reason: `at_store`, `at_load`, `malformed`."""
    to_move: Gauge[int]
    """Pages that other nodes should have and that have not had their turn yet."""
    moved: Counter[int]
    """Pages that were brought to other nodes, because those came or this one leaves."""
    moved_bytes: Counter[int]
    move_failed: Counter[int]
    """Pages that another node should have and did not take; they stay, and are tried again."""
    sent_bytes: Counter[int]
    received_bytes: Counter[int]
    disk_errors: Counter[dict[str, int]]
    """What the disk refused, by reason, such as `no_space`, `read_only`, `io`."""
    disk_bad_pages: Counter[dict[str, int]]
    """Pages on disk that were damaged or gone, by reason, found at the start or at a load."""
    disk_raw_bytes: Counter[int]
    """Payloads that were written to disk, as they came."""
    disk_packed_bytes: Counter[int]
    """The same payloads, as they were written."""
    disk_opened_bytes: Counter[int]
    """Payloads that were read from disk, as they were given out."""
    disk_packed_pages: Counter[dict[str, int]]
    """Pages that were written to disk, by the codec that they were packed with."""
    disk_seal_s: Counter[float]
    """Spent on packing and encrypting what goes to disk."""
    disk_open_s: Counter[float]
    """Spent on decrypting, unpacking and checking what comes from disk."""
    disk_locked_pages: Counter[int]
    """Pages on disk that were found encrypted with a key that is not here."""
    object_state: Gauge[dict[str, int]]
    """1 for the state of the bucket, 0 for the others: `ok`, `read_only`, `off`, `probing`."""
    object_buffered_bytes: Gauge[int]
    """Payloads that are on their way to the bucket, and are served from memory until they are there."""
    object_errors: Counter[dict[str, int]]
    """Requests that failed, by reason, such as `timeout`, `unreachable`, `denied`."""
    object_bad_pages: Counter[dict[str, int]]
    """Pages in the bucket that were damaged or gone, by reason, found at a load."""
    object_opened: Counter[int]
    """How often the bucket went off."""
    object_read_bytes: Counter[int]
    object_written_bytes: Counter[int]
    object_written: Counter[int]
    """Objects made: page files, and packs of small pages."""
    object_removed: Counter[int]
    object_lost_races: Counter[int]
    """Pages that another node had written to the bucket already."""
    object_dropped_pages: Counter[int]
    """Pages that were taken for the bucket and did not get there."""
    write_through_waiting: Gauge[int]
    """Pages that are to be copied to the last tier, and wait for that."""
    write_through_passed_over: Counter[int]
    """Pages that are not, because too many wait: they go there when they have to leave."""
    object_raw_bytes: Counter[int]
    """Payloads that were packed for the bucket, as they came."""
    object_packed_bytes: Counter[int]
    """The same payloads, as they were sent."""
    object_packed_pages: Counter[dict[str, int]]
    """Pages that were made for the bucket, by the codec that they were packed with."""
    object_seal_s: Counter[float]
    """Spent on packing and encrypting what goes to the bucket."""
    object_open_s: Counter[float]
    """Spent on decrypting, unpacking and checking what comes from the bucket."""
    object_locked_pages: Counter[int]
    """Pages in the bucket that were found encrypted with a key that is not here."""

"""What a tiered cache counts.

Covers the counts of all its tiers together. Does not cover what a tier or a policy counts itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounters:
    """What happened since the start."""

    hits: int = 0
    misses: int = 0
    pending: int = 0
    stored: int = 0
    no_room: int = 0
    evicted: int = 0
    demoted: int = 0
    promoted: int = 0

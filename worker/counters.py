"""What an engine counts.

Covers the counts of requests, tokens and loads since the start. Does not cover what it says of
itself to others (`pie.worker.status`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from pie.worker.load_choice import LoadTier


def _by_tier() -> Counter[LoadTier]:
    return Counter(dict.fromkeys(LoadTier, 0))


@dataclass(slots=True)
class Counters:
    """What an engine has counted since its start."""

    steps: int = 0
    requests: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens_device: int = 0
    cached_tokens_loaded: Counter[LoadTier] = field(default_factory=_by_tier)
    pages_loaded: Counter[LoadTier] = field(default_factory=_by_tier)
    forks: int = 0

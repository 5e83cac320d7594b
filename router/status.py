"""What a router says of the cluster as it sees it.

Covers the answer of `GET /status`, which `pie status` prints. Does not cover metrics
(`pie.router.metrics`).
"""

from __future__ import annotations

import msgspec


class PlaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A pool node."""

    place: str
    address: str
    pages: dict[str, int]
    """Page parts in each tier, as the index knows them."""


class WorkerStatus(PlaceStatus, frozen=True, kw_only=True):
    """A worker, with the load that it last reported."""

    state: str
    """`ready`, `draining`, or `unreachable` while the router has no connection."""
    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    total_pages: int = 0
    prefill_tokens_per_s: float = 0.0


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster. Counts are since the router's start."""

    model: str
    """What clients call the model; empty while no worker is known."""
    index: str
    """`ok`, `degraded` or `resyncing`."""
    workers: list[WorkerStatus]
    pool: list[PlaceStatus]
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: dict[str, int] = {}
    """Prompt tokens that were not computed, by where their pages came from."""

    @property
    def cached_tokens_total(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(self.cached_tokens.values())

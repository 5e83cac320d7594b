"""What can be set about the pool.

Covers the `[pool]` section: how many nodes, their budgets, and the limits that nodes and clients
keep. Does not cover which pages leave first (`pie.policies`).
"""

from __future__ import annotations

from pydantic import BaseModel, ByteSize, ConfigDict, Field


class PoolSettings(BaseModel):
    """The pool's nodes and the limits that they and their clients keep."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: int = Field(default=1, ge=0, description="Pool nodes to start; 0 runs without a pool.")
    ram_budget: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=1 << 20,
        description="RAM that one node's pages and their bookkeeping may take, such as `8GiB`.",
    )
    claim_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="How long a writer that announced a page may take to send it before another "
        "writer may.",
    )
    inflight_budget: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 20,
        description="Payload bytes that one client may have on the way to or from the pool.",
    )
    check_threads: int = Field(
        default=1, ge=1, le=64, description="Threads of a node that copy and verify payloads."
    )

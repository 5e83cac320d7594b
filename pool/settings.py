"""What can be set about the pool.

Covers the `[pool]` section: how many nodes, their budgets, and the limits that nodes and clients
keep. Does not cover which pages leave first (`pie.policies`).
"""

from __future__ import annotations

import enum
from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

_LEAST_DISK_BYTES = 1 << 20


class Durability(enum.StrEnum):
    """When a page on disk survives a loss of power. All survive the end of the process."""

    NONE = "none"
    """When the system gets to it, within half a minute or so."""
    BATCH = "batch"
    """A second after it was stored."""
    ALWAYS = "always"
    """As soon as it can be read."""


class Compression(enum.StrEnum):
    """How payloads are packed before they are written."""

    NONE = "none"
    LZ4 = "lz4"
    BSHUF_LZ4 = "bshuf-lz4"
    """The first bytes of all numbers together, then the second bytes and so on, and `lz4`."""
    AUTO = "auto"
    """The better of the two, where samples say that it saves a tenth or more."""


class PoolSettings(BaseModel):
    """The pool's nodes and the limits that they and their clients keep."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    nodes: int = Field(
        default=1,
        ge=0,
        le=64,
        description="Pool nodes that `pie serve` starts; 0 runs without a pool, unless nodes of "
        "`pie pool` are `outside`.",
    )
    outside: bool = Field(
        default=False,
        description="Whether there are nodes that `pie pool` runs, so that workers use a pool also "
        "where `nodes` is 0.",
    )
    name: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9_.-]{0,64}$",
        description="Name of the node that `pie pool` runs, the same at each of its starts; empty "
        "takes `pool-` and the name of the host.",
    )
    listen: str = Field(
        default="tcp://127.0.0.1:0",
        description="Where the node that `pie pool` runs listens, such as `curve://10.0.0.5:7410` "
        "for other hosts or `tcp://127.0.0.1:0` for this one; port 0 takes a free one.",
    )
    ram_budget: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=1 << 20,
        le=1 << 50,
        description="RAM that one node's pages and their bookkeeping may take, such as `8GiB`.",
    )
    disk_budget: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        le=1 << 50,
        description="Disk space that one node's pages may take, such as `200GiB`: what leaves RAM "
        "goes there and survives a restart. 0 keeps pages in RAM alone.",
    )
    disk_folders: tuple[Path, ...] = Field(
        default=(Path(".pie/pages"),),
        min_length=1,
        description="Folders for pages on disk, of one disk each where there are several; every "
        "node has a folder of its own in each.",
    )
    disk_durability: Durability = Field(
        default=Durability.BATCH,
        description="When a page on disk survives a loss of power: `none` when the system gets to "
        "it, `batch` after a second, `always` at once.",
    )
    disk_compression: Compression = Field(
        default=Compression.NONE,
        description="How pages on disk are packed: `none`, `lz4`, `bshuf-lz4` (the bytes of numbers "
        "sorted by place first), or `auto`: what saves most, where samples say that it saves a tenth "
        "or more.",
    )
    keep_bad_pages: bool = Field(
        default=False,
        description="Set damaged page files aside, the latest 32 in `bad/` of their folder, "
        "instead of removing them.",
    )
    claim_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=3_600,
        description="How long a writer that announced a page may take to send it before another "
        "writer may.",
    )
    inflight_budget: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 20,
        le=1 << 40,
        description="Payload bytes that one client may have on the way to or from the pool.",
    )
    check_threads: int = Field(
        default=1, ge=1, le=64, description="Threads of a node that copy and verify payloads."
    )

    @field_validator("disk_budget")
    @classmethod
    def _is_off_or_enough(cls, value: ByteSize) -> ByteSize:
        if 0 < value < _LEAST_DISK_BYTES:
            raise ValueError("0 keeps pages in RAM alone; a disk budget is 1MiB or more")
        return value

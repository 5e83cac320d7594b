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


class Addressing(enum.StrEnum):
    """Where in an object's address the bucket's name stands."""

    AUTO = "auto"
    """As `path` where an endpoint is set, and as AWS wants it otherwise."""
    PATH = "path"
    VIRTUAL = "virtual"


class ObjectChecksums(enum.StrEnum):
    """Whether requests carry the checksums that AWS added in 2025, beside Pie's own."""

    WHEN_REQUIRED = "when_required"
    """Only where S3 wants one: for servers that do not know the new ones."""
    WHEN_SUPPORTED = "when_supported"


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
        max_length=64,
        pattern=r"^([A-Za-z0-9_-]+([.][A-Za-z0-9_-]+)*)?$",
        description="Name of the node that `pie pool` runs, the same at each of its starts: letters, "
        "digits, `-`, `_`, and dots between them; empty takes `pool-` and the name of the host.",
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
    object_bucket: str = Field(
        default="",
        pattern=r"^([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])?$",
        description="Bucket of an S3 store that pages are kept in below RAM and disk, such as "
        "`pages`. Empty, there is none. Credentials come from where AWS's own tools take them: "
        "`AWS_ACCESS_KEY_ID` and the like, `~/.aws`, or the machine's role.",
    )
    object_endpoint_url: str = Field(
        default="",
        pattern=r"^(https?://[^/\s@?#]+/?)?$",
        description="Address of the store, such as `http://127.0.0.1:9000`; empty means AWS.",
    )
    object_prefix: str = Field(
        default="pie",
        max_length=256,
        pattern=r"^([A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*)?$",
        description="What names in the bucket begin with. Nodes and clusters that share bucket, "
        "prefix and secret share pages.",
    )
    object_budget: ByteSize = Field(
        default=ByteSize(100 << 30),
        ge=1 << 20,
        le=1 << 60,
        description="Bytes that all objects below the prefix may take together.",
    )
    object_region: str = Field(
        default="",
        max_length=64,
        pattern=r"^[a-z0-9-]*$",
        description="Region that requests are signed for; empty takes it from where AWS's tools "
        "do, or else `us-east-1`, which other stores mostly take.",
    )
    object_ca_file: Path | None = Field(
        default=None,
        description="File of certificates (PEM) that the store's own is checked against; unset "
        "takes the usual ones.",
    )
    object_addressing: Addressing = Field(
        default=Addressing.AUTO,
        description="Where the bucket's name stands: `path` in the path, `virtual` in the name "
        "of the host, `auto` in the path where an endpoint is set.",
    )
    object_checksums: ObjectChecksums = Field(
        default=ObjectChecksums.WHEN_REQUIRED,
        description="Whether requests carry S3's newer checksums: `when_required`, which all "
        "stores take, or `when_supported`. Pages have checksums of their own in any case.",
    )
    object_compression: Compression = Field(
        default=Compression.NONE,
        description="How pages in the bucket are packed, as `disk_compression`.",
    )
    object_write_through: bool = Field(
        default=True,
        description="Copy each page to the bucket soon after it came, so that what is there "
        "survives the node whatever ends it: `pie_pool_write_through_waiting` says how many pages "
        "are not there yet. false sends only what leaves RAM and disk.",
    )
    object_buffer: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=1 << 20,
        le=1 << 40,
        description="Payloads that one node may hold in memory until they are in the bucket.",
    )
    object_threads: int = Field(
        default=8,
        ge=1,
        le=256,
        description="Reads from the store that one node has under way at once; half as many "
        "writes beside them.",
    )
    object_connect_timeout_s: float = Field(
        default=2.0, gt=0, le=60, description="How long a connection to the store may take."
    )
    object_read_timeout_s: float = Field(
        default=5.0, gt=0, le=600, description="How long the store may be silent in an answer."
    )
    object_attempts: int = Field(
        default=3,
        ge=1,
        le=10,
        description="How often one request is tried, with growing, random waits between.",
    )
    object_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=600,
        description="How long one load waits for the store, attempts and queue included, before "
        "the page is computed again.",
    )
    object_look_s: float = Field(
        default=60.0,
        ge=1,
        le=86_400,
        description="Seconds between two looks at the bucket for pages of other nodes, and for "
        "pages that somebody has removed: one request for a thousand objects.",
    )
    keep_bad_pages: bool = Field(
        default=False,
        description="Set damaged page files aside, the latest 32 in `bad/` of their folder, "
        "instead of removing them.",
    )
    copies: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Nodes that keep each page, the same for all who use the pool: with 2, a node that "
        "dies costs no pages, and every page takes its bytes twice.",
    )
    move_rate: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        le=1 << 50,
        description="Payload bytes a second that a node hands to others when nodes come or go; 0 is no "
        "limit.",
    )
    move_after_s: float = Field(
        default=10.0,
        ge=0,
        le=3_600,
        description="How long the same nodes must be up before pages move: one that restarts is no "
        "reason to.",
    )
    drain_on_stop: bool = Field(
        default=False,
        description="Whether a node that is told to stop first hands its pages to other nodes.",
    )
    drain_timeout_s: float = Field(
        default=300.0,
        ge=0,
        le=86_400,
        description="How long a node of `pie pool` may take for that.",
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
    shared_memory: ByteSize = Field(
        default=ByteSize(64 << 20),
        ge=0,
        le=1 << 40,
        description="Memory of one client that nodes of its own host put pages into; 0 lets them send "
        "all over the wire.",
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

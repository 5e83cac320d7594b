"""What can be set about the page index.

Covers the `[index]` section. Does not cover where the values come from (`pie.cluster.config`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from pie.index.address import parse_address


class IndexSettings(BaseModel):
    """How places and readers use Redis."""

    # A URL has a password: `str()` of an error is not to show it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    url: str = Field(
        default="",
        description="Redis to use, such as `redis://host:6379/0`, `redis+sentinel://a,b,c/NAME` or "
        "`redis+cluster://a,b`: [index.md](index.md#connections). Empty starts an embedded server.",
    )
    data_dir: Path = Field(
        default=Path(".pie/index"),
        description="Folder of the embedded server: its data, log and socket.",
    )
    port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Loopback TCP port of the embedded server; 0 picks a free one. "
        "Unset uses a Unix socket, which only this user can open.",
    )
    memory_budget: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=16 << 20,
        le=1 << 50,
        description="Most memory that the embedded server may take for data.",
    )
    key_prefix: str = Field(
        default="pie",
        pattern=r"^[A-Za-z0-9_.:-]+$",
        description="What every key in Redis starts with; clusters that share a Redis differ in it.",
    )
    ttl_s: float = Field(
        default=5.0,
        gt=0.1,
        le=3_600,
        description="A place is taken for dead when it has not been heard of for so long.",
    )
    poll_s: float = Field(
        default=0.25,
        gt=0,
        le=3_600,
        description="How often readers look for places that came or went.",
    )
    request_timeout_s: float = Field(
        default=2.0,
        gt=0,
        le=3_600,
        description="Longest wait for one answer of Redis.",
    )
    queue_entries: int = Field(
        default=100_000,
        ge=1,
        le=100_000_000,
        description="Most changes that a place keeps while Redis is away; "
        "after more it announces all it holds anew.",
    )
    stream_events: int = Field(
        default=2_048,
        ge=1,
        le=10_000_000,
        description="Latest events kept for each place; a reader further behind reads it anew.",
    )
    stream_entries: int = Field(
        default=65_536,
        ge=1,
        le=100_000_000,
        description="Most changes of pages in those events together, about 80 bytes each.",
    )

    @field_validator("url")
    @classmethod
    def _url_is_understood(cls, url: str) -> str:
        if url:
            try:
                parse_address(url)
            except ValueError as error:
                raise ValueError(f"is no URL of a Redis: {error}") from None
        return url

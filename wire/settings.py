"""Limits of the wire.

Covers time limits, windows and sizes that both ends of a connection keep to. Does not cover
addresses: each place names its own.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class WireSettings(BaseModel):
    """Time limits, windows and sizes of a connection."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    heartbeat_s: float = Field(
        default=0.5, gt=0, description="Seconds between heartbeats in each direction."
    )
    gone_after_s: float = Field(
        default=2.5,
        gt=0,
        description="A host that acknowledges nothing for so long is gone. A process that ends "
        "is noticed at once.",
    )
    silent_after_s: float = Field(
        default=10.0,
        gt=0,
        description="A process that is there, but answers nothing for so long, is gone.",
    )
    connect_timeout_s: float = Field(
        default=5.0, gt=0, description="Longest wait for the first answer of a server."
    )
    send_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Longest wait for credit or for room in a connection's queue.",
    )
    credit_messages: int = Field(
        default=32,
        ge=1,
        description="Step and page messages that a sender may be ahead of its receiver.",
    )
    credit_bytes: int = Field(
        default=64 << 20,
        ge=1,
        description="Bytes that a sender may be ahead of its receiver. One message may exceed "
        "it, when nothing else is under way.",
    )
    inflight_requests: int = Field(
        default=512,
        ge=1,
        description="Requests that one client has under way; more wait their turn.",
    )
    inflight_bytes: int = Field(
        default=256 << 20,
        ge=1,
        description="Payload bytes of requests that one client has under way.",
    )
    max_handlers: int = Field(
        default=2048, ge=1, description="Messages that a server handles at once; more are refused."
    )
    max_handling_bytes: int = Field(
        default=1 << 30, ge=1, description="Payload bytes that a server handles at once."
    )
    receive_queue_messages: int = Field(
        default=1024,
        ge=1,
        description="Messages from one client that wait before a server takes them; each may be as "
        "large as the largest frame. More than the windows of a well-behaved client hold.",
    )
    max_header_bytes: int = Field(default=8 << 20, ge=1024, description="Largest header.")
    max_frame_bytes: int = Field(default=256 << 20, ge=1024, description="Largest payload frame.")
    max_frames: int = Field(default=4096, ge=1, description="Most payload frames of one message.")


WORKER_LIMITS = WireSettings(
    max_header_bytes=1 << 20, max_frame_bytes=8 << 20, max_frames=1, max_handling_bytes=64 << 20
)
"""What a worker takes. A request is one frame of token ids, and 8 MiB are two million of them."""

"""What a router says of itself, for `/status`, `/ready` and `pie status`."""

from __future__ import annotations

import msgspec


class WorkerLinkStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker as this router sees it."""

    place: str
    model: str
    address: str
    usable: bool
    """Whether it is connected and takes requests."""
    running: int
    """Attempts of this router."""
    queued_tokens: int
    decoding: int
    free_pages: int | None
    total_pages: int | None
    prefill_tokens_per_s: float


class RouterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A router as it is now; counts are since its start."""

    ready: bool
    reason: str
    """Why it is not ready; empty where it is."""
    draining: bool
    index: str
    models: tuple[str, ...]
    usable_workers: int
    workers: tuple[WorkerLinkStatus, ...]
    in_flight: int
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    output_tokens: int
    remembered_answers: int
    remembered_bytes: int

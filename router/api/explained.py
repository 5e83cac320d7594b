"""The shape of `GET /admin/requests/{id}`: what became of one request, and why.

Covers records alone: names of places, lengths, times and reasons, and nothing that a client wrote.
Does not cover making or keeping them (`pie.router.explain`).
"""

from __future__ import annotations

import msgspec

from pie.router.misses import Miss


class CandidateCost(msgspec.Struct, frozen=True):
    """What the routing policy made of a candidate, in milliseconds."""

    total_ms: float
    wait_ms: float
    load_ms: float
    prefill_ms: float
    decode_share_ms: float


class Candidate(msgspec.Struct, frozen=True):
    """One worker that could have taken the request, as the router knew it then."""

    place: str
    device_tokens: int
    """Prompt tokens that it held in device memory or was computing, by the index."""
    load_tokens: dict[str, int]
    """Prompt tokens that it could have fetched, by tier."""
    queued_tokens: int
    running: int
    cost: CandidateCost | None = None
    """None where the policy told none."""


class Attempt(msgspec.Struct, frozen=True):
    """One worker that was asked."""

    place: str
    after_tokens: int
    """Tokens of the answer that there were before: more than 0 is a resume."""
    predicted_tokens: int
    """Tokens that it was expected not to compute."""
    ending: str
    """`done`, or why it ended: `gone`, `silent`, `failed`, `late`, a worker's refusal, `cancelled`."""
    is_fork: bool
    """Whether it went to the worker that was computing the prompt for another choice."""
    candidates: list[Candidate]
    """Best first where the policy ranks them; the best 64 of those that it was shown."""
    awaited_tokens: int = 0
    """Leading tokens that it was to wait for, because another worker was computing them."""
    policy: str = ""
    """The routing policy that was in force; empty where none was asked."""
    policy_failure: str = ""
    """Why that did not choose, so that `cost` did: the kind and the place of what it raised; empty where it chose."""
    workers: int = 0
    """How many workers could have taken it; of many, the policy is shown those alone that can be the best."""


class LoadRun(msgspec.Struct, frozen=True):
    """Pages in a lower tier that were weighed against computing them."""

    tier: str
    pages: int
    load_ms: float
    compute_ms: float
    was_chosen: bool
    loaded_pages: int
    took_ms: float


class Delivered(msgspec.Struct, frozen=True):
    """How the worker of the first token began."""

    cached_tokens: dict[str, int]
    """Prompt tokens that were not computed, by tier."""
    queued_ms: float
    load_ms: float
    prefill_ms: float
    loads: list[LoadRun]
    load_overran: bool
    misses: list[Miss]
    """Every prompt token that was computed, with the reason."""


class ExplainedSequence(msgspec.Struct, frozen=True):
    """One sequence: a choice of a prompt."""

    index: int
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None
    first_token_ms: float | None
    attempts: list[Attempt]
    delivered: Delivered | None
    """None where no worker made a token."""


class Explained(msgspec.Struct, frozen=True):
    """What became of one request."""

    request_id: str
    arrived_unix_s: float
    path: str
    model: str
    tenant_tag: str
    """Empty without a salt; never the salt itself."""
    session_tag: str
    """Empty where the request names no conversation; never the name itself."""
    status: int
    duration_ms: float
    sequences: list[ExplainedSequence]
    sequences_left_out: int = 0


class ExplainedList(msgspec.Struct, frozen=True):
    """The latest requests that can be explained, the newest first."""

    requests: list[str]
    kept: int
    kept_bytes: int

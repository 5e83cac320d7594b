"""What a routing policy is: shown a request and its candidates, asked which worker takes it.

Covers the contract and the views it sees. Does not cover where the views come from
(`pie.router.choice`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pie.page.events import PlaceId


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request."""

    request_id: str
    prompt_tokens: int
    page_tokens: int
    session: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker that could take the request, as the router knows it now.

    Token counts are of the prompt's leading run: `device_tokens` could be used at once,
    `loads` come after them from the tiers named, and the rest is missing.
    """

    place: PlaceId
    device_tokens: int
    """Held in device memory or now being computed there."""
    loads: Mapping[str, int] = field(default_factory=dict)
    """Tokens that the worker would fetch, by tier: `host`, `disk`, `pool`."""
    queued_tokens: int = 0
    """Prompt tokens ahead of this request: waiting or in prefill."""
    running: int = 0
    """Sequences in decode."""
    prefill_tokens_per_s: float = 1000.0
    load_tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    decode_step_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Cost:
    """One candidate's estimated time to first token, and what it is made of, in milliseconds."""

    place: PlaceId
    total_ms: float
    wait_ms: float
    load_ms: float
    prefill_ms: float
    decode_share_ms: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker that takes the request, and every candidate's cost, best first."""

    place: PlaceId
    costs: tuple[Cost, ...]


class RoutingPolicy(Protocol):
    """Chooses a worker for a request."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker for `request`. `workers` is never empty; nothing is changed."""
        ...

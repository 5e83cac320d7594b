"""What a routing policy is: shown a request and its candidates, asked which worker takes it.

Covers the contract and the views it sees. Does not cover where the views come from
(`pie.router.choice`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from pie.page.events import PlaceId
from pie.page.key import PageKey

TWICE_COMPUTED = 2.0
"""How much more it costs to compute what another worker is computing: it takes time here too, which
others wait for, and room for pages."""

_SLOWEST_TOKENS_PER_S = 1.0
"""What a rate counts as that is not known yet or makes no sense."""


class RequestView(msgspec.Struct, frozen=True):
    """What a policy may know of a request."""

    request_id: str
    prompt_tokens: int
    page_tokens: int
    session: str | None = None
    """The conversation that it belongs to, as its client names it."""
    keys: Sequence[PageKey] = ()
    """Names of the prompt's full pages."""
    hot_tokens: int = 0
    """Leading tokens that many requests share that run now, wherever they run."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker that could take the request, as the router knows it now.

    Token counts are of the prompt's leading run: `device_tokens` could be used at once,
    `loads` come after them from the tiers named, and the rest is missing.
    """

    place: PlaceId
    device_tokens: int
    """Held in device memory or now being computed there."""
    loads: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Tokens that the worker would fetch, by tier: `host`, `disk`, `pool`."""
    queued_tokens: int = 0
    """Prompt tokens ahead of this request: waiting or in prefill."""
    waiting: int = 0
    """Requests ahead of this one that have no token yet."""
    running: int = 0
    """Sequences in decode."""
    prefill_tokens_per_s: float = 1000.0
    load_tokens_per_s: Mapping[str, float] = msgspec.field(default_factory=dict)
    decode_step_ms: float = 50.0
    free_share: float = 1.0
    """How much of its device memory is free or only kept for later, from 0 to 1."""
    has_session: bool = False
    """Whether it took the latest request of the same conversation."""
    coming_tokens: int = 0
    """Leading tokens that another worker is computing and the pool will have after that."""
    coming_ms: float = 0.0
    """About so long until then."""

    def awaited_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens beyond those held are better waited for than computed here too.

        They are loaded from the pool when another worker has computed them; 0 where computing is so much
        faster that it is worth doing twice.
        """
        beyond = min(self.coming_tokens, prompt_tokens - 1) - self.held_tokens
        if beyond <= 0:
            return 0
        load_ms = beyond * 1000 / divisible(self.load_tokens_per_s.get("pool", 0.0))
        compute_ms = beyond * 1000 / divisible(self.prefill_tokens_per_s)
        waited_ms = max(self.coming_ms, self.wait_ms) + load_ms
        return beyond if waited_ms < self.wait_ms + TWICE_COMPUTED * compute_ms else 0

    @property
    def in_flight(self) -> int:
        """Requests that it has."""
        return self.waiting + self.running

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt that it would not compute, wherever they are."""
        return self.device_tokens + sum(self.loads.values())

    @property
    def wait_ms(self) -> float:
        """How long the prompts ahead take, in milliseconds."""
        return max(self.queued_tokens, 0) * 1000 / divisible(self.prefill_tokens_per_s)


class Cost(msgspec.Struct, frozen=True):
    """One candidate's estimated time to first token, and what it is made of, in milliseconds."""

    place: PlaceId
    total_ms: float
    wait_ms: float
    load_ms: float
    prefill_ms: float
    decode_share_ms: float


class Choice(msgspec.Struct, frozen=True):
    """The worker that takes the request, and why."""

    place: PlaceId
    costs: tuple[Cost, ...] = ()
    """Every candidate's cost, best first; empty where the policy weighs no times."""


class RoutingPolicy(Protocol):
    """Chooses a worker for a request. Every router has its own, and asks it from one thread."""

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker for `request`. `workers` is a tuple, never empty, and in no order.

        What is no `Choice` of one of `workers`, with finite costs of them if any, counts as a failure: then the
        built-in policy answers.
        """
        ...


def divisible(tokens_per_s: float) -> float:
    """Return a rate that can be divided by."""
    # In this order a NaN is the slowest too.
    return max(_SLOWEST_TOKENS_PER_S, tokens_per_s)


def lot(request_id: str, place: str) -> bytes:
    """Return a place's lot in a draw for a request: any router draws alike, and places in turn."""
    return lots(request_id, [encoded(place)])[0]


def lots(request_id: str, places: Iterable[bytes]) -> list[bytes]:
    """Return the lots of several places, by their encoded names."""
    of, request = hashlib.blake2b, encoded(f"{request_id}/")
    return [of(request + place, digest_size=8).digest() for place in places]


def encoded(name: str) -> bytes:
    """Return a name as lots are drawn for it."""
    return name.encode(errors="surrogatepass")


def by_load(request: RequestView, worker: WorkerView) -> tuple[float, int, bool, bytes, str]:
    """Return what to sort by so that the worker that can begin soonest comes first.

    Of equally busy ones the one that has the conversation does, and else the lot decides.
    """
    return (
        worker.wait_ms,
        worker.in_flight,
        not worker.has_session,
        lot(request.request_id, worker.place),
        worker.place,
    )

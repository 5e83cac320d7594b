"""What a tenant may take of the whole cluster, of which every router draws a part.

Covers the contract, and an implementation in one process; `pie.index.allowance_conformance` is the suite
that both pass. Does not cover Redis (`pie.index.allowance_redis`) or what a client is told
(`pie.router.quota`).

An amount that refills lies in a bucket for all. A holder (a router, for as long as it runs) draws from it,
and spends what it has drawn without asking again. It always says its totals since its start, so that an
answer that was lost changes nothing: who asks again is told again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, Self

import msgspec

_MINUTE_S = 60.0
KEEP_S = 3600.0
"""How long it is remembered what a holder has drawn that says nothing any more."""
HOLD_S = 30.0
"""How long its sequences count that says nothing any more; it says something every sixth of that."""


class Limits(msgspec.Struct, frozen=True):
    """What a tenant may take; 0 is no limit."""

    requests_per_minute: float = 0
    tokens_per_minute: float = 0
    concurrent: int = 0
    """Sequences in flight."""


class Draw(msgspec.Struct, frozen=True):
    """What a holder says of one amount that refills."""

    spent: int = 0
    """Since its start, whether or not it was there."""
    drawn: int = 0
    """Since its start, as far as it knows. Counts where nobody else knows better."""
    need: int = 0
    """What it must have beyond `spent`."""
    spare: int = 0
    """What it would have beyond that, to spend without asking."""


class Hold(msgspec.Struct, frozen=True):
    """What a holder says of its sequences in flight."""

    inside: int = 0
    need: int = 0
    spare: int = 0


class Claim(msgspec.Struct, frozen=True):
    """What a holder says and wants: all that it needs, or nothing."""

    requests: Draw = Draw()
    tokens: Draw = Draw()
    sequences: Hold = Hold()


class Grant(msgspec.Struct, frozen=True):
    """What a holder has now."""

    is_given: bool
    """Whether it has all that it needs. Otherwise nothing was given, but what was spent is counted."""
    requests: int
    """Drawn since its start."""
    tokens: int
    """The same."""
    sequences: int
    """How many it may have in flight."""
    requests_wait_s: float = 0.0
    """When what it needs will be there, if nobody else takes it; 0 where it is."""
    tokens_wait_s: float = 0.0
    others: int = 0
    """Sequences of other holders."""


class Allowances(Protocol):
    """The allowances of all tenants."""

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        """Count what a holder has spent, and give it what it needs.

        A need of more than a minute's worth is there when the bucket is full.

        Raises:
            PageIndexError: Nothing is known.
        """
        ...


@dataclass(slots=True)
class Bucket:
    """An amount that refills evenly, up to a minute's worth. Begins full.

    Args:
        per_minute: How much refills in a minute, and the most that there ever is; 0 is no limit.
        at_s: The time.
    """

    per_minute: float
    at_s: float
    level: float = field(init=False)

    def __post_init__(self) -> None:
        self.level = self.per_minute

    def refill(self, per_minute: float, now_s: float) -> None:
        """Let time pass; a change of what refills leaves taken what was taken."""
        gained = max(0.0, now_s - self.at_s) * per_minute / _MINUTE_S
        changed = per_minute - self.per_minute
        # Of what had no limit, nothing was taken.
        before = self.level if self.per_minute else 0.0
        self.level = min(per_minute, before + gained + changed)
        self.per_minute, self.at_s = per_minute, now_s

    def wait_s(self, amount: float) -> float:
        """Return how long until `amount` is there; of more than a minute's worth, until it is full."""
        if not self.per_minute or amount <= 0:
            return 0.0
        missing = min(amount, self.per_minute) - self.level
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def give(self, drawn: int, draw: Draw) -> int:
        """Return what a holder has drawn when it has what it needs, and what there is to spare."""
        want = draw.spent + draw.need
        target = want + draw.spare
        if not self.per_minute:
            return want
        if drawn > target:
            self.level = min(self.per_minute, self.level + drawn - target)
            return target
        must = max(0, want - drawn)
        self.level -= must
        more = min(target - drawn - must, max(0, int(self.level)))
        self.level -= more
        return drawn + must + more


@dataclass(slots=True)
class _Held:
    requests: int
    tokens: int
    sequences: int = 0
    until_s: float = 0.0


class MemoryAllowances:
    """Allowances of holders in one process.

    Args:
        holder: Who claims.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        holder: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = holder
        self._clock = clock
        self.tenants: dict[str, _Tenant] = {}
        """What is left of each tenant's, and who has what."""

    def beside(self, holder: str) -> Self:
        """Return the same allowances for another holder."""
        other = type(self)(holder, self._clock)
        other.tenants = self.tenants
        return other

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        """Do as `Allowances.claim` says."""
        return self.claim_now(tenant, limits, claim)

    def claim_now(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        """Do as `Allowances.claim` says, at once."""
        now_s = self._clock()
        if tenant not in self.tenants:
            self.tenants[tenant] = _Tenant(limits, now_s)
        return self.tenants[tenant].claim(self._holder, limits, claim, now_s)

    def forget(self, tenant: str) -> None:
        """Forget what this holder has of a tenant's, but not what is left in the buckets."""
        if tenant in self.tenants:
            self.tenants[tenant].held.pop(self._holder, None)

    def keep(self, tenants: set[str]) -> None:
        """Forget all tenants but these."""
        for gone in self.tenants.keys() - tenants:
            del self.tenants[gone]


class _Tenant:
    def __init__(self, limits: Limits, now_s: float) -> None:
        self._requests = Bucket(limits.requests_per_minute, now_s)
        self._tokens = Bucket(limits.tokens_per_minute, now_s)
        self.held: dict[str, _Held] = {}

    def claim(self, holder: str, limits: Limits, claim: Claim, now_s: float) -> Grant:
        for name, held in list(self.held.items()):
            held.until_s = min(held.until_s, now_s + HOLD_S)
            if held.until_s + KEEP_S < now_s:
                del self.held[name]
        mine = self.held.setdefault(holder, _Held(claim.requests.drawn, claim.tokens.drawn))
        others = sum(
            held.sequences
            for name, held in self.held.items()
            if name != holder and held.until_s > now_s
        )
        self._requests.refill(limits.requests_per_minute, now_s)
        self._tokens.refill(limits.tokens_per_minute, now_s)
        mine.requests = _paid(self._requests, mine.requests, claim.requests)
        mine.tokens = _paid(self._tokens, mine.tokens, claim.tokens)
        waits = (
            self._requests.wait_s(_lack(mine.requests, claim.requests)),
            self._tokens.wait_s(_lack(mine.tokens, claim.tokens)),
        )
        sequences, room = claim.sequences, limits.concurrent - others
        must = sequences.inside + sequences.need
        fits = not limits.concurrent or not sequences.need or must <= room
        is_given = fits and not any(waits)
        mine.until_s = now_s + HOLD_S
        if is_given:
            mine.requests = self._requests.give(mine.requests, claim.requests)
            mine.tokens = self._tokens.give(mine.tokens, claim.tokens)
            mine.sequences = max(must, min(must + sequences.spare, room))
        else:
            mine.sequences = sequences.inside
        return Grant(is_given, mine.requests, mine.tokens, mine.sequences, *waits, others)


def _paid(bucket: Bucket, drawn: int, draw: Draw) -> int:
    """Count what was spent without having been drawn; return what is drawn then."""
    owed = max(0, draw.spent - drawn)
    if bucket.per_minute:
        bucket.level -= owed
    return drawn + owed


def _lack(drawn: int, draw: Draw) -> int:
    return draw.spent + draw.need - drawn

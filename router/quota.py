"""What a tenant may take: requests and tokens a minute, and sequences at once.

Covers counting and what a client is told that has to wait. Pure: time comes in as `now_s`. Does not
cover bytes of pages, which retention rules bound (`pie.policies.rules`). Counts are one router's.
"""

from __future__ import annotations

from pie.router.errors import ApiError, invalid, over_quota
from pie.router.key_file import Tenant

_MINUTE_S = 60.0


class Bucket:
    """An amount that refills evenly, up to a minute's worth.

    Args:
        per_minute: How much refills in a minute, and the most that there ever is.
        now_s: The time; it begins full.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at_s = now_s

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return how long until `amount` is there; of more than a minute's worth, until it is full."""
        self._refill(now_s)
        missing = min(amount, self.per_minute) - self._left
        return max(0.0, missing * _MINUTE_S / self.per_minute)

    def take(self, amount: float, now_s: float) -> None:
        """Take `amount`, whether or not it is there: what is owed delays what comes later."""
        self._refill(now_s)
        self._left -= amount

    def resize(self, per_minute: int, now_s: float) -> None:
        """Change how much refills; what was taken stays taken."""
        self._refill(now_s)
        self._left += per_minute - self.per_minute
        self.per_minute = per_minute

    def _refill(self, now_s: float) -> None:
        gained = (now_s - self._at_s) * self.per_minute / _MINUTE_S
        self._left = min(self._left + gained, float(self.per_minute))
        self._at_s = now_s


class Quota:
    """One tenant's counts.

    Args:
        name: The tenant's.
        limits: What it may take.
        now_s: The time.
    """

    def __init__(self, name: str, limits: Tenant, now_s: float) -> None:
        self._name = name
        self._limits = limits
        self._requests = _bucket(limits.requests_per_minute, now_s)
        self._tokens = _bucket(limits.tokens_per_minute, now_s)
        self.inside = 0
        """Sequences in flight."""

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are counted."""
        return self._tokens is not None

    def limit(self, limits: Tenant, now_s: float) -> None:
        """Change what it may take."""
        self._limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, now_s)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now_s)

    def enter(self, sequences: int, now_s: float) -> None:
        """Count a request in.

        Raises:
            ApiError: 429 where there is no room now, 400 where there never is; nothing is counted.
        """
        most = self._limits.concurrent
        if most is not None and sequences > most:
            raise invalid(
                f"{sequences} sequences for one request (its prompts times n or best_of) are more "
                f"than the {most} that tenant {self._name} may have at once",
                "n",
            )
        if most is not None and self.inside + sequences > most:
            raise over_quota(
                f"Tenant {self._name} has {self.inside} sequences in flight, of {most}.", 1.0
            )
        if self._requests is not None:
            self._check("requests", self._requests, 1, now_s)
            self._requests.take(1, now_s)
        self.inside += sequences

    def leave(self, sequences: int) -> None:
        """Count a request out."""
        self.inside -= sequences

    def prompt(self, tokens: int, now_s: float) -> None:
        """Take a prompt's tokens.

        Raises:
            ApiError: 429; nothing is taken.
        """
        if self._tokens is not None:
            self._check("tokens", self._tokens, tokens, now_s)
            self._tokens.take(tokens, now_s)

    def answered(self, tokens: int, now_s: float) -> None:
        """Take an answer's tokens, which nobody knew before it was made."""
        if self._tokens is not None:
            self._tokens.take(tokens, now_s)

    def _check(self, what: str, bucket: Bucket, amount: int, now_s: float) -> None:
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            raise _used_up(self._name, what, bucket.per_minute, wait_s)


def _bucket(per_minute: int | None, now_s: float) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute, now_s)


def _resized(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now_s)
    bucket.resize(per_minute, now_s)
    return bucket


def _used_up(name: str, what: str, per_minute: int, wait_s: float) -> ApiError:
    return over_quota(f"Tenant {name} may take {per_minute} {what} a minute.", wait_s)

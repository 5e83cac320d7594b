"""What a tenant may take: requests and tokens a minute, and sequences at once.

Covers one router's part of a tenant's allowance, and what a client is told that has to wait. Does not cover
what all routers have left of it together (`pie.index.allowance`), or bytes of pages, which retention rules
bound (`pie.policies.rules`).

A router draws a little more than it needs, so that most requests ask nobody: a 128th of a minute's worth,
and of the sequences that may be in flight. So a small limit is exact, and asked for each time.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

from pie.index.allowance import Allowances, Claim, Draw, Grant, Hold, Limits
from pie.index.errors import PageIndexError
from pie.router.errors import ApiError, invalid, over_quota
from pie.router.key_file import Tenant

log = logging.getLogger("pie.router.quota")

_SPARE = 128
_REFUSED_S = 1.0
"""How long a refusal is taken for the next one's answer: a limit that is used up is asked for no more often. What was
refused by a share, while Redis was away, may be there as soon as it is back."""
_WAIT_S = 1.0
"""Longest wait of a request for its turn to draw."""
_AGAIN_S = 0.02
"""What another router let go of this moment may be on its way."""


class Quota:
    """One tenant's counts. For one event loop.

    Args:
        name: The tenant's.
        limits: What it may take.
        allowances: What is left of that, of all routers together.
        clock: Tells the time in seconds.
    """

    def __init__(
        self,
        name: str,
        limits: Tenant,
        allowances: Allowances,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._limits = limits
        self._allowances = allowances
        self._clock = clock
        self._requests = _Share()
        self._tokens = _Share()
        self._held = 0
        self._turn = asyncio.Lock()
        self._drawing = False
        self._waiting = _Waiting()
        self._settling: asyncio.Task[None] | None = None
        self._again = False
        """Whether something has changed since the settling that is under way began."""
        self.inside = 0
        """Sequences in flight here."""
        self.claimed_s = -math.inf
        """When something was claimed last, by the clock."""

    @property
    def name(self) -> str:
        """The tenant's."""
        return self._name

    @property
    def counts_tokens(self) -> bool:
        """Whether tokens are counted."""
        return self._limits.tokens_per_minute is not None

    def limit(self, limits: Tenant) -> None:
        """Change what it may take; what was taken stays taken."""
        if limits.concurrent is None or self._limits.concurrent is None:
            # Nobody was told what is in flight, so that others may have got what was held for more.
            self._held = 0
        # Of what has no limit nothing is owed, and nothing at hand, once it gets one.
        if self._limits.requests_per_minute is None:
            self._requests.spent = self._requests.drawn
        if self._limits.tokens_per_minute is None:
            self._tokens.spent = self._tokens.drawn
        self._limits = limits
        for share in (self._requests, self._tokens):
            share.refused(0, 0.0, 0.0)

    async def enter(self, sequences: int) -> None:
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
        if not self._has(1, 0, sequences):
            await self._draw(1, 0, sequences)
        else:
            self._take(1, 0, sequences)
        self._settle_soon()

    def leave(self, sequences: int) -> None:
        """Count a request out."""
        self.inside -= sequences
        self._settle_soon()

    async def prompt(self, tokens: int) -> None:
        """Take a prompt's tokens.

        Raises:
            ApiError: 429; nothing is taken.
        """
        if self._limits.tokens_per_minute is None:
            return
        if not self._has(0, tokens, 0):
            await self._draw(0, tokens, 0)
        else:
            self._take(0, tokens, 0)
        self._settle_soon()

    def answered(self, tokens: int) -> None:
        """Take an answer's tokens, which nobody knew before it was made."""
        if self._limits.tokens_per_minute is not None:
            self._tokens.spent += tokens
            self._settle_soon()

    async def settle(self) -> None:
        """Tell what was spent and what is in flight, and draw what is to be at hand.

        Raises:
            PageIndexError: Nobody was told.
        """
        async with self._turn:
            claim = self._claim(0, 0, 0)
            # What is being given back is not to be had meanwhile.
            self._held = min(self._held, claim.sequences.inside + claim.sequences.spare)
            self._told(await self._claimed(claim))

    @property
    def is_settled(self) -> bool:
        """Whether nobody needs to be told anything, not even that this router is still there."""
        limits = self._limits
        is_owing = limits.tokens_per_minute is not None and self._tokens.left < 0
        return not is_owing and (limits.concurrent is None or not (self.inside or self._held))

    @property
    def _totals(self) -> Limits:
        limits = self._limits
        return Limits(
            limits.requests_per_minute or 0, limits.tokens_per_minute or 0, limits.concurrent or 0
        )

    def _has(self, requests: int, tokens: int, sequences: int) -> bool:
        """Say whether so much is at hand."""
        limits = self._limits
        return not self._drawing and (
            (limits.requests_per_minute is None or self._requests.left >= requests)
            and (limits.tokens_per_minute is None or not tokens or self._tokens.left >= tokens)
            and (limits.concurrent is None or self._held - self.inside >= sequences)
        )

    def _take(self, requests: int, tokens: int, sequences: int) -> None:
        self._requests.spent += requests
        self._tokens.spent += tokens
        self.inside += sequences

    async def _draw(self, requests: int, tokens: int, sequences: int) -> None:
        """Take what is not at hand.

        Raises:
            ApiError: 429.
        """
        self._check_refused(requests, tokens)
        self._waiting.add(requests, tokens, sequences)
        try:
            async with asyncio.timeout(_WAIT_S):
                grant = await self._drawn(requests, tokens, sequences)
                if grant is not None and not (grant.requests_wait_s or grant.tokens_wait_s):
                    await asyncio.sleep(_AGAIN_S)
                    grant = await self._drawn(requests, tokens, sequences)
        except TimeoutError:
            text = f"Requests of tenant {self._name} could not be counted within {_WAIT_S:g} s."
            raise over_quota(text, _WAIT_S) from None
        finally:
            self._waiting.add(-requests, -tokens, -sequences)
        if grant is not None:
            raise self._refusal(grant, requests, tokens)

    async def _drawn(self, requests: int, tokens: int, sequences: int) -> Grant | None:
        """Take it when it is this one's turn, and return nothing; or return why it is not there."""
        async with self._turn:
            if self._has(requests, tokens, sequences):
                self._take(requests, tokens, sequences)
                return None
            claim = self._claim(requests, tokens, sequences)
            self._drawing = True
            try:
                grant = await self._claimed(claim)
            except BaseException:
                # It may have been given, and nobody else gets it until this is settled.
                self._settle_later()
                raise
            finally:
                self._drawing = False
            self._told(grant)
            now_s = self._clock()
            # Who asks for the one learns nothing of the other.
            if requests:
                self._requests.refused(requests, now_s, grant.requests_wait_s)
            if tokens:
                self._tokens.refused(tokens, now_s, grant.tokens_wait_s)
            if not grant.is_given:
                return grant
            self._take(requests, tokens, sequences)
            return None

    async def _claimed(self, claim: Claim) -> Grant:
        self.claimed_s = self._clock()
        return await self._allowances.claim(self._name, self._totals, claim)

    def _claim(self, requests: int, tokens: int, sequences: int) -> Claim:
        limits, waiting = self._limits, self._waiting
        spare = (limits.concurrent or 0) // _SPARE if self.inside or sequences else 0
        return Claim(
            self._requests.draw(
                requests, max(0, waiting.requests - requests), limits.requests_per_minute
            ),
            self._tokens.draw(tokens, max(0, waiting.tokens - tokens), limits.tokens_per_minute),
            Hold(self.inside, sequences, spare + max(0, waiting.sequences - sequences)),
        )

    def _told(self, grant: Grant) -> None:
        self._requests.drawn, self._tokens.drawn = grant.requests, grant.tokens
        self._held = grant.sequences

    def _settle_soon(self) -> None:
        """Settle beside what is under way, where that is due."""
        limits = self._limits
        spare = (limits.concurrent or 0) // _SPARE if self.inside else 0
        is_due = (
            self._requests.is_low(limits.requests_per_minute)
            or self._tokens.is_low(limits.tokens_per_minute)
            or (limits.concurrent is not None and self._held > self.inside + spare)
        )
        if is_due:
            self._settle_later()

    def _settle_later(self) -> None:
        if self._settling is None:
            self._settling = asyncio.get_running_loop().create_task(self._settle_beside())
        else:
            self._again = True

    async def _settle_beside(self) -> None:
        try:
            self._again = True
            while self._again:
                self._again = False
                await self.settle()
        except PageIndexError as error:
            log.debug("the quota of tenant %s is not settled: %s", self._name, error)
        except Exception:
            log.exception("the quota of tenant %s was not settled", self._name)
        finally:
            self._settling = None

    def _check_refused(self, requests: int, tokens: int) -> None:
        """Refuse what was refused a moment ago without asking again.

        Raises:
            ApiError: 429.
        """
        now_s = self._clock()
        if (wait_s := self._requests.refused_s(requests, now_s)) > 0:
            raise self._used_up("requests", wait_s)
        if (wait_s := self._tokens.refused_s(tokens, now_s)) > 0:
            raise self._used_up("tokens", wait_s)

    def _refusal(self, grant: Grant, requests: int, tokens: int) -> ApiError:
        if requests and grant.requests_wait_s:
            return self._used_up("requests", grant.requests_wait_s)
        if tokens and grant.tokens_wait_s:
            return self._used_up("tokens", grant.tokens_wait_s)
        inside = self.inside + grant.others
        text = (
            f"Tenant {self._name} has {inside} sequences in flight, of {self._limits.concurrent}."
        )
        return over_quota(text, 1.0)

    def _used_up(self, what: str, wait_s: float) -> ApiError:
        per_minute = (
            self._limits.requests_per_minute
            if what == "requests"
            else self._limits.tokens_per_minute
        )
        return over_quota(f"Tenant {self._name} may take {per_minute} {what} a minute.", wait_s)


class _Share:
    """What a router has of an amount that refills."""

    def __init__(self) -> None:
        self.spent = 0
        self.drawn = 0
        self._refused = 0
        self._refused_until_s = 0.0
        self._asks_again_s = 0.0

    @property
    def left(self) -> int:
        """What is at hand; less than nothing is owed."""
        return self.drawn - self.spent

    def draw(self, need: int, waiting: int, per_minute: int | None) -> Draw:
        """Return what is said of it; nothing of a share is given back, since it is a small one."""
        spare = (per_minute or 0) // _SPARE + waiting
        return Draw(self.spent, self.drawn, need, max(spare, self.left - need))

    def refused(self, need: int, now_s: float, wait_s: float) -> None:
        """Remember for a moment that so much is not there before `wait_s` from now."""
        self._refused, self._refused_until_s = need, now_s + wait_s
        self._asks_again_s = now_s + _REFUSED_S

    def refused_s(self, need: int, now_s: float) -> float:
        """Return for how long so much is not there; 0 where it may be."""
        if not 0 < self._refused <= need or now_s >= self._asks_again_s:
            return 0.0
        return self._refused_until_s - now_s

    def is_low(self, per_minute: int | None) -> bool:
        """Say whether something is owed, or little is left of what is to be at hand."""
        return per_minute is not None and self.left < per_minute // _SPARE // 2


class _Waiting:
    """What all requests that wait for their turn need."""

    def __init__(self) -> None:
        self.requests = self.tokens = self.sequences = 0

    def add(self, requests: int, tokens: int, sequences: int) -> None:
        self.requests += requests
        self.tokens += tokens
        self.sequences += sequences

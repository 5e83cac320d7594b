"""The suite that all allowances pass: what is left is shared, and nobody gets what is not there.

Covers the contract of `pie.index.allowance` without waiting for refills. An implementation is tested by a
subclass:

    class TestMyAllowances(AllowanceConformance):
        @asynccontextmanager
        async def holders(self, count: int) -> AsyncIterator[Sequence[Allowances]]:
            ...

pytest runs it, with asynchronous tests on (`asyncio_mode = "auto"`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from pie.index.allowance import Allowances, Claim, Draw, Hold, Limits

_SLOW = 0.02
"""Of so much a minute nothing to speak of comes while a test runs."""


class AllowanceConformance:
    """What every implementation must do."""

    def holders(self, count: int) -> AbstractAsyncContextManager[Sequence[Allowances]]:
        """Return so many holders that share allowances of which nothing was taken."""
        raise NotImplementedError

    async def test_what_one_takes_another_cannot(self) -> None:
        """What is taken is gone for all."""
        limits = Limits(requests_per_minute=3)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _requests(0, need=2))).requests == 2
            assert (await other.claim("t", limits, _requests(0, need=1))).is_given
            grant = await other.claim("t", limits, _requests(1, drawn=1, need=1))
            assert not grant.is_given
            assert grant.requests == 1
            assert 15.0 < grant.requests_wait_s <= 20.0
            assert (await other.claim("u", limits, _requests(0, need=3))).is_given

    async def test_who_asks_again_is_told_again(self) -> None:
        """A claim that is repeated changes nothing."""
        limits = Limits(tokens_per_minute=10)
        async with self.holders(2) as (one, other):
            for _ in range(3):
                assert (await one.claim("t", limits, _tokens(0, need=4))).tokens == 4
            grant = await other.claim("t", limits, _tokens(0, need=6))
            assert (grant.is_given, grant.tokens) == (True, 6)

    async def test_what_is_to_spare_goes_to_who_needs_it(self) -> None:
        """Spare is what others do not need, and can be given back."""
        limits = Limits(requests_per_minute=10)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _requests(0, need=1, spare=20))).requests == 10
            assert not (await other.claim("t", limits, _requests(0, need=1))).is_given
            back = await one.claim("t", limits, _requests(1, drawn=10, spare=2))
            assert back.requests == 3
            assert (await other.claim("t", limits, _requests(0, need=7))).is_given

    async def test_what_was_spent_is_counted_whether_or_not_it_was_there(self) -> None:
        """Who spends more than it drew owes it, for all."""
        limits = Limits(tokens_per_minute=10)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _tokens(25))).tokens == 25
            refused = await other.claim("t", limits, _tokens(0, need=1))
            assert not refused.is_given
            assert 90.0 < refused.tokens_wait_s <= 96.0

    async def test_more_than_a_minutes_worth_is_there_when_nothing_is_owed(self) -> None:
        """A need that is larger than the bucket waits for a full one."""
        limits = Limits(tokens_per_minute=10)
        async with self.holders(1) as (one,):
            assert (await one.claim("t", limits, _tokens(0, need=30))).tokens == 30
            refused = await one.claim("t", limits, _tokens(30, drawn=30, need=30))
            assert 100.0 < refused.tokens_wait_s <= 180.0

    async def test_all_is_given_or_nothing(self) -> None:
        """A claim that is refused in one thing takes nothing of the others."""
        limits = Limits(requests_per_minute=10, tokens_per_minute=1, concurrent=5)
        claim = Claim(Draw(need=1), Draw(need=1), Hold(need=1))
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, claim)).is_given
            refused = await other.claim("t", limits, claim)
            assert (refused.is_given, refused.requests, refused.sequences) == (False, 0, 0)
            assert (refused.requests_wait_s, refused.others) == (0, 1)
            assert refused.tokens_wait_s > 0
            grant = await one.claim("t", limits, _requests(1, drawn=1, need=9))
            assert grant.is_given

    async def test_sequences_in_flight_are_those_of_all_holders(self) -> None:
        """They are counted over all holders, and given back."""
        limits = Limits(concurrent=3)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _sequences(0, need=2))).sequences == 2
            grant = await other.claim("t", limits, _sequences(0, need=1, spare=5))
            assert (grant.is_given, grant.sequences, grant.others) == (True, 1, 2)
            refused = await one.claim("t", limits, _sequences(2, need=1))
            assert (refused.is_given, refused.sequences, refused.others) == (False, 2, 1)
            assert (await one.claim("t", limits, _sequences(1))).sequences == 1
            assert (await other.claim("t", limits, _sequences(1, need=1))).is_given

    async def test_what_is_in_flight_counts_where_nobody_knew_of_it(self) -> None:
        """What runs is told, not asked for."""
        limits = Limits(concurrent=2)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _sequences(4))).sequences == 4
            assert not (await other.claim("t", limits, _sequences(0, need=1))).is_given

    async def test_a_changed_limit_keeps_what_was_taken(self) -> None:
        """What was taken stays taken."""
        limits = Limits(requests_per_minute=2)
        more = msgspec.structs.replace(limits, requests_per_minute=4)
        async with self.holders(1) as (one,):
            assert (await one.claim("t", limits, _requests(0, need=1))).is_given
            assert (await one.claim("t", more, _requests(1, drawn=1, need=3))).is_given
            assert not (await one.claim("t", more, _requests(4, drawn=4, need=1))).is_given
            none = await one.claim("t", Limits(), _requests(4, drawn=4, need=9))
            assert (none.is_given, none.requests) == (True, 13)
            # What has a limit anew begins with all of it.
            assert (await one.claim("t", limits, _requests(13, drawn=13, need=2))).is_given

    async def test_less_than_one_a_minute_is_one_when_nothing_is_owed(self) -> None:
        """A limit that is divided among many may be less than one."""
        limits = Limits(requests_per_minute=_SLOW)
        async with self.holders(2) as (one, other):
            assert (await one.claim("t", limits, _requests(0, need=1))).is_given
            assert not (await other.claim("t", limits, _requests(0, need=1))).is_given

    async def test_many_holders_take_all_there_is_and_no_more(self) -> None:
        """Together they take a minute's worth."""
        limits = Limits(tokens_per_minute=100)
        async with self.holders(5) as holders:
            spent = [0] * 5
            for at in range(40):
                holder = at % 5
                claim = _tokens(spent[holder], drawn=spent[holder], need=7)
                if (await holders[holder].claim("t", limits, claim)).is_given:
                    spent[holder] += 7
            # A few more may have come meanwhile.
            assert 98 <= sum(spent) <= 119


def _requests(spent: int, drawn: int = 0, need: int = 0, spare: int = 0) -> Claim:
    return Claim(requests=Draw(spent, drawn, need, spare))


def _tokens(spent: int, drawn: int = 0, need: int = 0, spare: int = 0) -> Claim:
    return Claim(tokens=Draw(spent, drawn, need, spare))


def _sequences(inside: int, need: int = 0, spare: int = 0) -> Claim:
    return Claim(sequences=Hold(inside, need, spare))

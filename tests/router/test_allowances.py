"""A router's own share of tenants' allowances while Redis is away, and what is told of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings, strategies as st

from pie.index.allowance import Claim, Draw, Grant, Hold, Limits, MemoryAllowances
from pie.index.errors import IndexUnavailableError
from pie.router.allowances import DividedAllowances
from pie.router.errors import ApiError
from pie.router.key_file import Tenant
from pie.router.quota import Quota
from tests.router.test_quota import settled


class World:
    """A time that a test sets, and whether Redis is there."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.is_away = False

    def __call__(self) -> float:
        return self.now_s


class Flaky:
    """Allowances that are away now and then."""

    def __init__(self, inner: MemoryAllowances, world: World) -> None:
        self._inner = inner
        self._world = world

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        if self._world.is_away:
            raise IndexUnavailableError("away")
        return await self._inner.claim(tenant, limits, claim)


def divided(world: World, count: int) -> list[DividedAllowances]:
    first = MemoryAllowances("0", world)
    shared = [first, *(first.beside(str(number)) for number in range(1, count))]
    return [DividedAllowances(Flaky(one, world), count, world) for one in shared]


async def entered(quota: Quota) -> bool:
    try:
        await quota.enter(1)
    except ApiError:
        return False
    return True


async def kept(quotas: Sequence[Quota]) -> None:
    """Do as the keeper of quotas does now and then, and when Redis is back."""
    for quota in quotas:
        await quota.settle()


async def one_after_the_other(quota: Quota) -> int:
    """Return how many are let in until one is refused."""
    for count in range(400):
        if not await entered(quota):
            return count
        quota.leave(1)
    return 400


async def all_is_to_be_had(world: World, quotas: Sequence[Quota], requests: int) -> None:
    """Assert that each gets its share, and with Redis all what is the cluster's, once nothing can be owed any more."""
    for is_away in (True, False):
        world.is_away = is_away
        world.now_s += 3_000
        await kept(quotas)
        await settled()
        let_in = [await one_after_the_other(quota) for quota in quotas]
        if is_away:
            assert min(let_in) >= max(1, requests // 3)
        else:
            assert sum(let_in) >= requests


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "leave", "many", "wait", "away", "back"]), st.integers(0, 2)
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=80)
@given(STEPS, st.sampled_from([1, 7, 300]), st.integers(1, 7))
@example([("many", 0), ("away", 0), ("many", 1), ("many", 2)], 7, 7)
def test_each_outage_lets_one_more_minutes_worth_through_and_no_more(
    steps: list[tuple[str, int]], requests: int, concurrent: int
) -> None:
    async def run() -> None:
        world = World()
        tenant = Tenant("salt", requests_per_minute=requests, concurrent=concurrent)
        parts = divided(world, 3)
        quotas = [Quota("t", tenant, one, world) for one in parts]
        inside = [0, 0, 0]
        let_in = outages = 0
        for what, at in steps:
            if what == "wait":
                world.now_s += 1 + 7 * at
                await kept(quotas)
            elif what == "leave" and inside[at]:
                quotas[at].leave(1)
                inside[at] -= 1
            elif what == "away":
                outages += not world.is_away
                world.is_away = True
            elif what == "back" and world.is_away:
                world.is_away = False
                await kept(quotas)
                assert not any(one.divided for one in parts)
            elif what == "enter" and await entered(quotas[at]):
                inside[at] += 1
                let_in += 1
                if not outages:
                    assert sum(inside) <= concurrent
                assert inside[at] <= concurrent
            elif what == "many":
                let_in += await one_after_the_other(quotas[at])
            await settled()
            refilled = world.now_s * requests / 60
            # One of a share that is less than one is let in when nothing is owed.
            assert let_in <= requests + refilled + outages * (requests + 3) + 1e-6
        for at, quota in enumerate(quotas):
            quota.leave(inside[at])
        await all_is_to_be_had(world, quotas, requests)

    asyncio.run(run())


async def test_what_is_spent_between_two_outages_is_not_owed_in_the_second() -> None:
    world = World()
    part, *_ = divided(world, 3)
    quota = Quota("t", Tenant("salt", requests_per_minute=12), part, world)
    for _ in range(3):
        world.is_away = True
        assert await one_after_the_other(quota) == 4
        world.is_away = False
        world.now_s += 60
        await quota.settle()
        assert await one_after_the_other(quota) >= 8
        world.now_s += 60
        await quota.settle()


async def test_a_share_is_an_nth_and_one_request_at_least() -> None:
    world = World()
    world.is_away = True
    one, other, _ = divided(world, 3)
    limits = Limits(requests_per_minute=9, tokens_per_minute=30, concurrent=7)
    for part in (one, other):
        grant = await part.claim("t", limits, Claim(Draw(need=3), Draw(need=10), Hold(need=2)))
        assert (grant.is_given, grant.requests, grant.tokens) == (True, 3, 10)
        refused = await part.claim("t", limits, Claim(Draw(3, 3, 1), Draw(10, 10), Hold(2)))
        assert not refused.is_given
        assert refused.requests_wait_s == pytest.approx(20)
        full = await part.claim("t", limits, Claim(Draw(3, 3), Draw(10, 10), Hold(2, need=1)))
        assert not full.is_given
    few = Limits(concurrent=4)
    assert (await one.claim("u", few, Claim(sequences=Hold(0, need=4)))).is_given
    assert not (await one.claim("u", few, Claim(sequences=Hold(4, need=1)))).is_given


async def test_more_routers_than_were_started_with_have_smaller_shares() -> None:
    world = World()
    world.is_away = True
    one, *_ = divided(world, 3)
    limits = Limits(requests_per_minute=12)
    one.counted(1)
    assert (await one.claim("t", limits, Claim(Draw(need=4)))).is_given
    one.counted(6)
    assert (await one.claim("u", limits, Claim(Draw(need=2)))).is_given
    assert not (await one.claim("u", limits, Claim(Draw(2, 2, 1)))).is_given


async def test_a_limit_that_is_set_later_counts_from_then_on() -> None:
    world = World()
    before = Tenant("s", concurrent=100_000)
    quota = Quota("t", before, MemoryAllowances("a", world), world)
    await quota.enter(1)
    for _ in range(1000):
        assert await entered(quota)
        quota.leave(1)
    await settled()
    quota.limit(Tenant("s", concurrent=100_000, requests_per_minute=60))
    assert [await entered(quota) for _ in range(61)] == [True] * 60 + [False]


@pytest.mark.parametrize("lost", ["tokens", "requests"])
async def test_what_a_share_refused_is_asked_for_again_when_redis_is_back(lost: str) -> None:
    world = World()
    limits = Tenant("s", tokens_per_minute=1000, requests_per_minute=8)
    one, other = (Quota("t", limits, part, world) for part in divided(world, 8)[:2])

    async def takes(quota: Quota) -> bool:
        if lost == "requests":
            return await entered(quota)
        try:
            await quota.prompt(120)
        except ApiError:
            return False
        return True

    world.is_away = True
    assert await takes(one)
    assert not await takes(one)
    world.now_s += 1
    world.is_away = False
    await kept([one, other])
    await settled()
    assert await takes(other)
    assert await takes(one)

"""What is old in what routers share: the scripts, at times that a test sets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from pie.index.allowance import HOLD_S, KEEP_S, Claim, Draw, Hold, Limits, MemoryAllowances
from pie.index.allowance_redis import RedisAllowances
from pie.index.client import make_client
from pie.index.commons import NOW, Argument, Commons
from pie.index.settings import IndexSettings
from pie.index.shelf import ShelfLimits
from pie.index.shelf_redis import LINGER_S, RedisShelf
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]


Triple: TypeAlias = tuple[int, int, int]


class Timed(Commons):
    """Scripts find the time that the test says; what Redis lets expire by itself it does by its own clock."""

    now_s = 1e9
    on_answer: Callable[[], object] = staticmethod(lambda: None)

    async def _call(self, script: str, keys: Sequence[str], args: Sequence[Argument]) -> object:
        assert NOW in script
        script = script.replace(NOW, "local now = tonumber(table.remove(ARGV))")
        answer = await super()._call(script, keys, [*args, int(Timed.now_s * 1000)])
        self.on_answer()
        return answer


@asynccontextmanager
async def timed(index: IndexSettings, count: int = 1) -> AsyncIterator[list[Timed]]:
    """Yield connections of so many routers."""
    Timed.now_s = 1e9
    made = [Timed(index.url, index, 10.0) for _ in range(count)]
    yield made
    for one in made:
        await one.close()


@pytest.mark.parametrize("by_use", [False, True])
async def test_each_value_is_kept_for_its_own_time(
    index_settings: IndexSettings, by_use: bool
) -> None:
    async with timed(index_settings) as (commons,):
        shelf = RedisShelf(commons, "s", ShelfLimits(10, 1 << 20, 60.0, by_use))
        await shelf.put([("a", b"1"), ("used", b"2")])
        Timed.now_s += 40
        await shelf.put([("b", b"3")])
        assert await shelf.get("used") == b"2"
        Timed.now_s += 19.999
        assert await shelf.get("a") == b"1"
        if by_use:
            Timed.now_s += 40
        Timed.now_s += 0.001
        assert await shelf.get("b") == (None if by_use else b"3")
        Timed.now_s += 0.001
        assert await shelf.get("used") is None


async def test_what_is_old_is_removed_when_more_is_put(index_settings: IndexSettings) -> None:
    async with timed(index_settings) as (commons,):
        shelf = RedisShelf(commons, "s", ShelfLimits(10, 1 << 20, 60.0))
        await shelf.put([("a", b"1")])
        Timed.now_s += 40
        await shelf.put([("b", b"2")])
        Timed.now_s += 20
        await shelf.put([("c", b"3")])
        latest = await shelf.latest(9)
        assert (latest.names, latest.count, latest.used_bytes) == (["c", "b"], 2, 2 * 302)
        assert await shelf.get("b") == b"2"


@pytest.mark.parametrize(
    ("count", "size", "most_at_once"), [(1_000, 10, 128), (24, 1 << 20, 5)], ids=["many", "large"]
)
async def test_what_is_old_is_removed_in_steps_before_it_expires(
    index_settings: IndexSettings, count: int, size: int, most_at_once: int
) -> None:
    client: Any
    values = f"{index_settings.key_prefix}:{{shelf:s}}:values"
    async with timed(index_settings) as (commons,):
        shelf = RedisShelf(commons, "s", ShelfLimits(10_000, 1 << 30, 60.0))
        await shelf.put([(f"{at:04}", b"x" * size) for at in range(count)])
        Timed.now_s += 60
        with make_client(index_settings.url, index_settings) as client:
            assert client.pttl(values) > LINGER_S * 1000
            left = [count]
            commons.on_answer = lambda: left.append(client.hlen(values))
            await shelf.trim()
            assert left[-1] == 0
            assert max(more - less for more, less in pairwise(left)) <= most_at_once
            assert not client.keys(f"{index_settings.key_prefix}:{{shelf:s}}:*")


async def test_sequences_of_a_router_that_died_count_for_half_a_minute(
    index_settings: IndexSettings,
) -> None:
    limits = Limits(concurrent=3)
    async with timed(index_settings, 2) as (dies, other):
        claim = Claim(sequences=Hold(0, need=3))
        assert (await RedisAllowances(dies).claim("t", limits, claim)).is_given
        Timed.now_s += HOLD_S - 0.001
        refused = await RedisAllowances(other).claim("t", limits, claim)
        assert (refused.is_given, refused.others) == (False, 3)
        Timed.now_s += 0.001
        grant = await RedisAllowances(other).claim("t", limits, claim)
        assert (grant.is_given, grant.others) == (True, 0)


async def test_where_the_clock_is_set_back_who_died_counts_no_longer_and_who_lives_does(
    index_settings: IndexSettings,
) -> None:
    limits = Limits(concurrent=3)
    async with timed(index_settings, 3) as (dies, lives, other):
        for router, count in ((dies, 2), (lives, 1)):
            claim = Claim(sequences=Hold(0, need=count))
            assert (await RedisAllowances(router).claim("t", limits, claim)).is_given
            await router.routers()
        Timed.now_s -= 86_400
        asked = Claim(sequences=Hold(0, need=1))
        assert (await RedisAllowances(other).claim("t", limits, asked)).others == 3
        assert await other.routers() == 3
        Timed.now_s += HOLD_S / 2
        await RedisAllowances(lives).claim("t", limits, Claim(sequences=Hold(1)))
        await lives.routers()
        Timed.now_s += HOLD_S / 2
        grant = await RedisAllowances(other).claim("t", limits, asked)
        assert (grant.is_given, grant.others) == (True, 1)
        assert await other.routers() == 2


@pytest.mark.parametrize("by_use", [False, True])
async def test_where_the_clock_is_set_back_what_is_put_last_stays_longest(
    index_settings: IndexSettings, by_use: bool
) -> None:
    async with timed(index_settings) as (commons,):
        shelf = RedisShelf(commons, "s", ShelfLimits(3, 1 << 20, 60.0, by_use))
        for name in "abc":
            await shelf.put([(name, b"x")])
            Timed.now_s += 1
        Timed.now_s -= 86_400
        for name in "zyxw":
            await shelf.put([(name, b"x")])
            if by_use:
                assert await shelf.get("c") == b"x"
        assert (await shelf.latest(9)).names == (["c", "w", "x"] if by_use else ["w", "x", "y"])


JUMPS_S = [-86_400, -HOLD_S - 10, 0, 10, 20, HOLD_S, 86_400, KEEP_S]
AMOUNTS = st.integers(0, 9)
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1), st.sampled_from(JUMPS_S), *[st.tuples(AMOUNTS, AMOUNTS, AMOUNTS)] * 2
    ),
    max_size=20,
)


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(STEPS)
def test_whatever_the_clock_does_redis_gives_what_one_process_would(
    index_settings: IndexSettings, steps: list[tuple[int, float, Triple, Triple]]
) -> None:
    # Whole numbers refill in each jump.
    limits = Limits(6.0, 12.0, 4)

    async def run() -> None:
        async with timed(index_settings, 2) as routers:
            first = MemoryAllowances("0", lambda: Timed.now_s)
            memories = [first, first.beside("1")]
            tenant = routers[0].router
            spent, drawn = [0, 0], [(0, 0), (0, 0)]
            for at, jump_s, amounts, sequences in steps:
                Timed.now_s += jump_s
                spent[at] += amounts[0]
                claim = Claim(
                    Draw(spent[at], drawn[at][0], *amounts[1:]),
                    Draw(spent[at], drawn[at][1], *amounts[1:]),
                    Hold(*sequences),
                )
                one = await memories[at].claim(tenant, limits, claim)
                same = await RedisAllowances(routers[at]).claim(tenant, limits, claim)
                assert same == one
                drawn[at] = (one.requests, one.tokens)

    asyncio.run(run())


async def test_what_a_router_that_died_had_drawn_is_remembered_for_an_hour(
    index_settings: IndexSettings,
) -> None:
    limits = Limits(requests_per_minute=9)
    claim = Claim(requests=Draw(need=1))
    client: Any
    async with timed(index_settings, 2) as (dies, other):
        with make_client(index_settings.url, index_settings) as client:
            key = f"{index_settings.key_prefix}:{{tenant:t}}:allowance"
            for router in (dies, other):
                await RedisAllowances(router).claim("t", limits, claim)
            for passed_s, names in (
                (HOLD_S + KEEP_S, {dies.router, other.router}),
                (1, {other.router}),
            ):
                Timed.now_s += passed_s
                await RedisAllowances(other).claim("t", limits, claim)
                found = {name.decode()[3:] for name in client.hkeys(key) if name.startswith(b"by:")}
                assert found == names


async def test_a_router_that_says_nothing_is_none_after_a_while(
    index_settings: IndexSettings,
) -> None:
    client: Any
    async with timed(index_settings, 2) as (dies, other):
        with make_client(index_settings.url, index_settings) as client:
            assert await dies.routers() == 1
            Timed.now_s += 19.999
            assert await other.routers() == 2
            Timed.now_s += 0.001
            assert await other.routers() == 1
            assert client.hlen(f"{index_settings.key_prefix}:{{routers}}:up") == 1

"""What is old in what routers share: the scripts, at times that a test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from pie.index.allowance import HOLD_S, KEEP_S, Claim, Draw, Hold, Limits
from pie.index.allowance_redis import RedisAllowances
from pie.index.client import make_client
from pie.index.commons import NOW, Argument, Commons
from pie.index.settings import IndexSettings
from pie.index.shelf import ShelfLimits
from pie.index.shelf_redis import LINGER_S, RedisShelf
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]


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

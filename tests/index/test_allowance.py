"""Allowances in one process and in Redis: the suite, both against each other, and refills."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from redis.exceptions import ResponseError

from pie.index.allowance import Allowances, Claim, Draw, Hold, Limits, MemoryAllowances
from pie.index.allowance_conformance import AllowanceConformance
from pie.index.allowance_redis import RedisAllowances
from pie.index.client import make_client, translated
from pie.index.commons import Commons
from pie.index.errors import IndexRefusedError, IndexUnavailableError
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.index.shelf import ShelfLimits
from pie.index.shelf_redis import RedisShelf
from tests.support.redis_server import index_settings, own_redis_server, redis_server, redis_url

__all__ = ["index_settings", "own_redis_server", "redis_server", "redis_url"]


class TestMemory(AllowanceConformance):
    @asynccontextmanager
    async def holders(self, count: int) -> AsyncIterator[Sequence[Allowances]]:
        first = MemoryAllowances("0")
        yield [first, *(first.beside(str(n)) for n in range(1, count))]


class TestRedis(AllowanceConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, index_settings: IndexSettings) -> None:
        self.settings = index_settings

    @asynccontextmanager
    async def holders(self, count: int) -> AsyncIterator[Sequence[Allowances]]:
        routers = [Commons(self.settings.url, self.settings, 10.0) for _ in range(count)]
        yield [RedisAllowances(router) for router in routers]
        for router in routers:
            await router.close()


AMOUNTS = st.integers(0, 12)
DRAWS = st.builds(lambda spent, need, spare: (spent, need, spare), AMOUNTS, AMOUNTS, AMOUNTS)
CLAIMS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), DRAWS, DRAWS, st.tuples(*[st.integers(0, 3)] * 3)),
    max_size=20,
)


@settings(
    deadline=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(CLAIMS, st.sampled_from([0.0, 0.01, 6.0]), st.sampled_from([0, 4]))
def test_redis_gives_what_one_process_would(
    index_settings: IndexSettings,
    claims: list[tuple[int, bool, tuple[int, ...], tuple[int, ...], tuple[int, ...]]],
    tokens: float,
    concurrent: int,
) -> None:
    limits = Limits(0.02, tokens, concurrent), Limits(0.03, tokens, concurrent)

    async def run() -> None:
        routers = [Commons(index_settings.url, index_settings, 10.0) for _ in range(3)]
        # Time stands still in the one; what refills in the other meanwhile is less than a token.
        first = MemoryAllowances("0", lambda: 0.0)
        memories = [first, first.beside("1"), first.beside("2")]
        tenant = routers[0].router
        spent = [[0, 0] for _ in range(3)]
        drawn = [[0, 0] for _ in range(3)]
        for at, other, requests, more, sequences in claims:
            spent[at][0] += requests[0]
            spent[at][1] += more[0]
            claim = Claim(
                Draw(spent[at][0], drawn[at][0], *requests[1:]),
                Draw(spent[at][1], drawn[at][1], *more[1:]),
                Hold(*sequences),
            )
            one = await memories[at].claim(tenant, limits[other], claim)
            same = await RedisAllowances(routers[at]).claim(tenant, limits[other], claim)
            assert (same.is_given, same.requests, same.tokens, same.sequences, same.others) == (
                one.is_given,
                one.requests,
                one.tokens,
                one.sequences,
                one.others,
            )
            drawn[at] = [one.requests, one.tokens]
        for router in routers:
            await router.close()

    asyncio.run(run())


async def test_it_refills_and_waiting_as_told_is_enough(index_settings: IndexSettings) -> None:
    commons = Commons(index_settings.url, index_settings, 10.0)
    allowances = RedisAllowances(commons)
    limits = Limits(requests_per_minute=600)
    claim = Claim(requests=Draw(need=600))
    assert (await allowances.claim("t", limits, claim)).is_given
    claim = Claim(requests=Draw(spent=600, drawn=600, need=3))
    while (refused := await allowances.claim("t", limits, claim)).is_given:
        # So slow is the machine that as many have come meanwhile.
        claim = Claim(requests=Draw(spent=refused.requests, drawn=refused.requests, need=3))
    assert 0 < refused.requests_wait_s <= 0.3
    await asyncio.sleep(refused.requests_wait_s)
    assert (await allowances.claim("t", limits, claim)).is_given
    await commons.close()


async def test_what_somebody_else_wrote_counts_as_nothing(index_settings: IndexSettings) -> None:
    commons = Commons(index_settings.url, index_settings, 10.0)
    allowances = RedisAllowances(commons)
    key = f"{index_settings.key_prefix}:{{tenant:t}}:allowance"
    limits = Limits(requests_per_minute=5)
    with make_client(index_settings.url, index_settings) as client:
        client.set(key, "mine")
        assert (await allowances.claim("t", limits, Claim(requests=Draw(need=5)))).is_given
        client.hset(key, "requests", "much")
        client.hset(key, "by:another", "of it")
        grant = await allowances.claim("t", limits, Claim(requests=Draw(5, 5, 5)))
        assert (grant.is_given, grant.requests) == (True, 10)
        assert 0 < int(client.pttl(key)) <= 2 * 3_600_000
    await commons.close()


async def test_routers_know_how_many_they_are(index_settings: IndexSettings) -> None:
    one, other = (Commons(index_settings.url, index_settings, 10.0) for _ in range(2))
    assert await one.routers() == 1
    assert await other.routers() == 2
    assert await one.routers() == 2
    await one.close()
    await other.close()


async def test_who_does_not_answer_is_waited_for_once(own_redis_server: EmbeddedServer) -> None:
    server = own_redis_server
    commons = Commons(server.url, IndexSettings(key_prefix="p"))
    assert await commons.routers() == 1
    server.kill()
    with pytest.raises(IndexUnavailableError):
        await commons.routers()
    assert is_degraded(commons)
    with pytest.raises(IndexUnavailableError, match="at present"):
        await commons.routers()
    server.start()
    for _ in range(600):
        with contextlib.suppress(IndexUnavailableError):
            if await commons.routers() == 1:
                break
        await asyncio.sleep(0.1)
    assert not is_degraded(commons)
    await commons.close()


async def test_what_redis_refuses_is_refused_to_its_caller_alone(
    own_redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = own_redis_server
    client: Any
    with make_client(server.url, IndexSettings()) as client:
        client.execute_command("ACL", "SETUSER", "default", "-zadd")
    commons = Commons(server.url, IndexSettings(key_prefix="p"), 10.0)
    shelf = RedisShelf(commons, "s", ShelfLimits(9, 9_999, 60.0))
    allowances = RedisAllowances(commons)
    for _ in range(3):
        with pytest.raises(IndexRefusedError):
            await shelf.put([("a", b"x")])
        assert (await allowances.claim("t", Limits(9), Claim(Draw(need=1)))).is_given
        assert await commons.routers() == 1
        assert is_degraded(commons)
    (said,) = (line for line in caplog.messages if "share" in line)
    assert "zadd" in said
    server.kill()
    with pytest.raises(IndexUnavailableError):
        await commons.routers()
    server.start()
    for _ in range(600):
        with contextlib.suppress(IndexUnavailableError):
            await shelf.put([("a", b"x")])
            break
        await asyncio.sleep(0.1)
    assert await shelf.get("a") == b"x"
    assert not is_degraded(commons)
    await commons.close()


async def test_a_redis_that_is_full_is_away_for_all(own_redis_server: EmbeddedServer) -> None:
    client: Any
    commons = Commons(own_redis_server.url, IndexSettings(key_prefix="p"), 10.0)
    shelf = RedisShelf(commons, "s", ShelfLimits(9, 9_999, 60.0))
    with make_client(own_redis_server.url, IndexSettings()) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(IndexUnavailableError, match="maxmemory") as full:
            await shelf.put([("a", b"x")])
        assert not isinstance(full.value, IndexRefusedError)
        assert not client.exists("p:{shelf:s}:values")
        with pytest.raises(IndexUnavailableError, match="at present"):
            await commons.routers()
        client.config_set("maxmemory", 0)
    await commons.close()


def test_what_an_older_redis_says_of_a_script_is_known() -> None:
    for word, kind in (
        ("OOM command not allowed", IndexUnavailableError),
        ("READONLY You can't write", IndexUnavailableError),
        ("NOPERM this user", IndexRefusedError),
    ):
        with pytest.raises(IndexUnavailableError) as caught, translated():
            raise ResponseError(f"Error running script (call to f_1): @user_script:3: -{word}")
        assert type(caught.value) is kind


def is_degraded(commons: Commons) -> bool:
    return commons.is_degraded

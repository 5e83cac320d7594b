"""Somebody else writes over what routers share: it counts as nothing, and the next call works."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hypothesis import HealthCheck, given, settings, strategies as st

from pie.index.allowance import Claim, Draw, Hold, Limits
from pie.index.allowance_redis import RedisAllowances
from pie.index.client import make_client
from pie.index.commons import Commons
from pie.index.settings import IndexSettings
from pie.index.shelf import ShelfLimits
from pie.index.shelf_redis import RedisShelf
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

WORDS = st.sampled_from(
    [
        "",
        "0",
        "-1",
        "1",
        "9" * 15,
        "9" * 25,
        "9" * 400,
        "1e300",
        "inf",
        "-inf",
        "nan",
        "0x10",
        "1.2.3",
    ]
)
TEXTS = WORDS | st.lists(WORDS, max_size=5).map(" ".join) | st.binary(max_size=9)
SCORES = st.sampled_from([0.0, -1.0, 0.5, 1e15, 1e16, 1e300, float("inf"), float("-inf")])
MINE = "MINE"


@settings(
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.dictionaries(st.sampled_from(["requests", "tokens", "by:", "by:a", f"by:{MINE}"]), TEXTS),
    st.dictionaries(st.sampled_from(["a", MINE, ""]), TEXTS),
    st.dictionaries(st.sampled_from("abc"), SCORES),
    TEXTS,
)
def test_the_next_call_works_whatever_is_written_there(
    index_settings: IndexSettings,
    allowance: Mapping[str, str | bytes],
    up: Mapping[str, str | bytes],
    order: Mapping[str, float],
    size: str | bytes,
) -> None:
    async def run(client: Any) -> None:
        commons = Commons(index_settings.url, index_settings, 10.0)
        try:
            prefix = index_settings.key_prefix
            for key, fields in (
                (f"{prefix}:{{tenant:t}}:allowance", allowance),
                (f"{prefix}:{{routers}}:up", up),
            ):
                client.delete(key)
                for name, said in fields.items():
                    client.hset(key, name.replace(MINE, commons.router), said)
            claim = Claim(Draw(spent=1, need=1), Draw(spent=1, need=1), Hold(1, need=1))
            for _ in range(2):
                grant = await RedisAllowances(commons).claim("t", Limits(6, 12, 4), claim)
                assert grant.requests >= 1
                assert grant.others >= 0
                assert min(grant.requests_wait_s, grant.tokens_wait_s) >= 0
            assert 1 <= await commons.routers() <= len(up) + 1
            for by_use in (False, True):
                shelf = RedisShelf(commons, "s", ShelfLimits(3, 10_000, 60.0, by_use))
                await shelf.put([("a", b"1"), ("d", b"2")])
                if order:
                    client.zadd(f"{prefix}:{{shelf:s}}:order", order)
                client.set(f"{prefix}:{{shelf:s}}:bytes", size)
                assert await shelf.get("a") in (b"1", None)
                await shelf.put([("e", b"3")])
                assert await shelf.get("e") == b"3"
                assert (await shelf.latest(1)).names == ["e"]
                await shelf.trim()
            assert not commons.is_degraded
        finally:
            await commons.close()

    with make_client(index_settings.url, index_settings) as client:
        asyncio.run(run(client))

"""What routers have counted, in Redis: what they told last, and nothing that none of them told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import cast

import pytest

from pie.index import tallies
from pie.index.client import make_client
from pie.index.commons import Commons
from pie.index.settings import IndexSettings
from pie.index.tallies import MOST_BYTES, Tallies, Tally
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]


@pytest.fixture
async def routers(index_settings: IndexSettings) -> AsyncIterator[list[Tallies]]:
    every = [Commons(index_settings.url, index_settings, 10.0) for _ in range(3)]
    yield [Tallies(one) for one in every]
    for one in every:
        await one.close()


@pytest.fixture
def redis_key(index_settings: IndexSettings) -> str:
    return f"{index_settings.key_prefix}:{{routers}}:counts"


async def heard(tallies: Tallies) -> dict[str, int]:
    return {one.router: one.requests for one in await tallies.others()}


async def test_each_hears_what_the_others_told_last(routers: list[Tallies]) -> None:
    one, two, three = routers
    assert await heard(one) == {}
    for number, router in enumerate(routers):
        await router.tell(Tally(f"r{number}", requests=number))
    assert await heard(one) == {"r1": 1, "r2": 2}
    await two.tell(Tally("r1", {"w0": 1}, requests=5))
    assert await heard(three) == {"r0": 0, "r1": 5}
    await two.withdraw()
    assert await heard(three) == {"r0": 0}
    assert await heard(two) == {"r0": 0, "r2": 2}


async def test_who_has_told_nothing_for_a_while_is_left_out(
    routers: list[Tallies], index_settings: IndexSettings
) -> None:
    one, two, _ = routers
    await two.tell(Tally("r1", requests=1))
    client = make_client(index_settings.url, index_settings)
    try:
        (key,) = two._keys
        (name,) = client.hkeys(key)
        # Long ago, and as if the clock was set back since.
        for then in ("1000", "99999999999999"):
            client.hset(key, name, f'{then} {{"router": "r1", "requests": 1}}')
            assert await heard(one) == {}
            assert client.hlen(key) == 0
    finally:
        client.close()


async def test_what_no_router_wrote_counts_nothing(
    routers: list[Tallies], redis_key: str, index_settings: IndexSettings
) -> None:
    one, two, _ = routers
    client = make_client(index_settings.url, index_settings)
    try:
        client.set(redis_key, "junk")
        assert await heard(one) == {}
        await two.tell(Tally("r1", requests=1))
        (told,) = cast(list[bytes], client.hvals(redis_key))
        now = told.split()[0].decode()
        large = '{"router": "x", "requests": 1}' + " " * MOST_BYTES
        none, negative = '{"requests": 1}', '{"router": "x", "requests": -1}'
        for number, junk in enumerate(("", "[" * 9_000, none, negative, large)):
            client.hset(redis_key, f"x{number}", f"{now} {junk}")
        client.hset(redis_key, "y", "later")
        assert await heard(one) == {"r1": 1}
    finally:
        client.close()


async def test_a_tally_of_very_many_workers_goes_without_them(routers: list[Tallies]) -> None:
    one, two, _ = routers
    await two.tell(Tally("r1", {f"worker-{at}": 9 for at in range(MOST_BYTES)}, requests=1))
    assert await one.others() == [Tally("r1", requests=1)]


async def test_one_of_another_version_counts_as_far_as_it_is_understood(
    routers: list[Tallies], redis_key: str, index_settings: IndexSettings
) -> None:
    one, two, _ = routers
    await two.tell(Tally("r1", requests=1))
    client = make_client(index_settings.url, index_settings)
    try:
        (told,) = cast(list[bytes], client.hvals(redis_key))
        older, later = '{"router": "a"}', '{"router": "b", "requests": 2, "new": {"a": 1}}'
        for name, said in (("a", older), ("b", later)):
            client.hset(redis_key, name, f"{told.split()[0].decode()} {said}")
        assert await heard(one) == {"r1": 1, "a": 0, "b": 2}
    finally:
        client.close()


async def test_so_many_routers_are_heard(
    routers: list[Tallies], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tallies, "MOST_ROUTERS", 1)
    for number, router in enumerate(routers):
        await router.tell(Tally(f"r{number}", requests=number))
    assert len(await routers[0].others()) == 1

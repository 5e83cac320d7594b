"""What routers tell each other: both implementations pass the suite, and Redis is held up by neither."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
import redis

from pie.index.errors import IndexUnavailableError
from pie.index.router_views import (
    MOST_GROUPS,
    MOST_PAGES_OF_SESSIONS,
    MOST_ROUTERS,
    MOST_SESSION_PAGES,
    MOST_SESSIONS,
    MemoryRouterViews,
    Move,
    RouterView,
    RouterViews,
    bounded,
)
from pie.index.router_views_conformance import RouterViewsConformance, seen
from pie.index.router_views_redis import RedisRouterViews
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from tests.support.redis_server import (
    index_settings,
    own_redis_server,
    redis_server,
    redis_url,
)

__all__ = ["index_settings", "own_redis_server", "redis_server", "redis_url"]

FULL = MOST_PAGES_OF_SESSIONS // MOST_SESSIONS
"""Pages of each conversation where as many as may be have as many as may be."""


class TestMemory(RouterViewsConformance):
    now_s = 0.0

    @contextmanager
    def routers(self, count: int) -> Iterator[Sequence[RouterViews]]:
        first = MemoryRouterViews("0", clock=lambda: self.now_s)
        yield [first, *(first.beside(str(number)) for number in range(1, count))]

    def pass_ttl(self) -> None:
        self.now_s += 5.0


@pytest.mark.live
class TestRedis(RouterViewsConformance):
    @pytest.fixture(autouse=True)
    def _settings(self, index_settings: IndexSettings) -> None:
        self.settings = index_settings
        self.names = itertools.count()

    @contextmanager
    def routers(self, count: int) -> Iterator[Sequence[RouterViews]]:
        made = [
            RedisRouterViews(self.settings.url, f"router {next(self.names)}", self.settings)
            for _ in range(count)
        ]
        yield made
        for one in made:
            one.close()

    def pass_ttl(self) -> None:
        # As it would expire, but at once.
        client = redis.Redis.from_url(self.settings.url)
        for key in client.scan_iter(f"{self.settings.key_prefix}:{{routers}}:view:*"):
            client.pexpire(key, 1)
            while client.exists(key):
                time.sleep(0.001)
        client.close()


@contextmanager
def pair(index: IndexSettings) -> Iterator[tuple[RedisRouterViews, RedisRouterViews]]:
    made = [RedisRouterViews(index.url, name, index) for name in ("one", "two")]
    yield made[0], made[1]
    for one in made:
        one.close()


@pytest.mark.live
def test_what_lies_in_redis_expires_and_nothing_is_left(index_settings: IndexSettings) -> None:
    client = redis.Redis.from_url(index_settings.url)
    found = f"{index_settings.key_prefix}:{{routers}}:*"
    with pair(index_settings) as (one, two):
        one.tell(RouterView((), (seen(),)))
        two.move([Move("s", PlaceId("w0"))])
        ttls = {key.decode().split(":")[2]: client.pttl(key) for key in client.scan_iter(found)}
        assert 0 < ttls["view"] <= 5_000
        assert 0 < ttls["moves"] <= 600_000
        client.delete(f"{index_settings.key_prefix}:{{routers}}:view:one")
        assert not two.others()
        assert client.smembers(f"{index_settings.key_prefix}:{{routers}}:seeing") == set()
    assert [key.decode().split(":")[2] for key in client.scan_iter(found)] == ["moves"]
    client.close()


@pytest.mark.live
def test_a_router_that_dies_is_gone_by_itself(index_settings: IndexSettings) -> None:
    dies = RedisRouterViews(index_settings.url, "dies", index_settings, ttl_s=0.2)
    with pair(index_settings) as (one, two):
        one.tell(RouterView((), (seen(),)))
        dies.tell(RouterView((), (seen("t"),)))
        end_s = time.monotonic() + 20.0
        while "dies" in two.others():
            assert time.monotonic() < end_s, "it is still there"
            one.tell(RouterView((), (seen(),)))
            time.sleep(0.02)
        assert list(two.others()) == ["one"]
    dies.close()


def test_long_conversations_of_a_view_have_a_most_together_and_the_latest_are_whole() -> None:
    whole, rest = divmod(MOST_PAGES_OF_SESSIONS, MOST_SESSION_PAGES - 1)
    long = tuple(seen(f"s{at}", MOST_SESSION_PAGES - 1, of=at) for at in range(whole + 2))
    told = [len(one.pages) for one in bounded(RouterView((), long)).sessions]
    assert told == [MOST_SESSION_PAGES - 1] * whole + [rest, 0]


@pytest.mark.live
def test_pages_cross_once(
    index_settings: IndexSettings,
) -> None:
    client = redis.Redis.from_url(index_settings.url)
    sessions = tuple(seen(f"s{at}", FULL, of=at) for at in range(MOST_SESSIONS))
    with pair(index_settings) as (one, two):
        for _ in range(12):
            one.tell(RouterView((), sessions))
            two.others()
        told = two.others()
        assert [len(view.sessions) for view in told.values()] == [MOST_SESSIONS]
        at = int(client.info("stats")["total_net_input_bytes"])
        one.tell(RouterView((), sessions))
        assert int(client.info("stats")["total_net_input_bytes"]) - at < 64 << 10
        at = int(client.info("stats")["total_net_output_bytes"])
        assert two.others() == told
        assert int(client.info("stats")["total_net_output_bytes"]) - at < 64 << 10
    client.close()


@pytest.mark.live
def test_all_views_together_have_a_most(index_settings: IndexSettings) -> None:
    client = redis.Redis.from_url(index_settings.url)
    made = [
        RedisRouterViews(index_settings.url, name, index_settings, pages_of_all=600)
        for name in ("one", "two", "three")
    ]
    sessions = tuple(seen(f"s{at}", 100, of=at) for at in range(9))
    told: list[int] = []
    for count in (1, 3):
        # Each learns at its own turn how many there are.
        for _ in range(3):
            for one in made[:count]:
                one.tell(RouterView((), sessions))
        views = client.scan_iter(f"{index_settings.key_prefix}:{{routers}}:view:*")
        told.append(sum(client.hlen(key) - 1 for key in views))
    assert told == [6, 6]
    # The latest conversations are told.
    assert [one.tag for one in made[0].others()["two"].sessions] == ["s0", "s1"]
    for one in made:
        one.close()
    client.close()


@pytest.mark.live
def test_a_large_view_that_changes_all_the_time_keeps_no_other_from_being_read(
    index_settings: IndexSettings,
) -> None:
    made = [
        RedisRouterViews(index_settings.url, name, index_settings) for name in ("a", "b", "leads")
    ]
    large, small, leads = made
    found = []
    for turn in range(3):
        large.tell(
            RouterView(
                (),
                tuple(seen(f"s{turn} {at}", FULL, of=1 + turn * 16 + at) for at in range(16)),
            )
        )
        small.tell(RouterView((), (seen("small"),)))
        found += [len(view.sessions) for view in leads.others().values()][1:]
    assert 1 in found[:2]
    assert found[2] == 1
    for one in made:
        one.close()


@pytest.mark.live
@pytest.mark.parametrize("tells_a_look", [1, 3])
def test_conversations_that_grow_all_the_time_keep_no_other_from_being_told(
    index_settings: IndexSettings, tells_a_look: int
) -> None:
    count = 40
    found: list[int] = []
    with pair(index_settings) as (one, two):
        for turn in range(3 * tells_a_look):
            grown = FULL - 9 + turn
            one.tell(RouterView((), tuple(seen(f"s{at}", grown, of=at) for at in range(count))))
            if turn % tells_a_look == tells_a_look - 1:
                found += [len(view.sessions) for view in two.others().values()]
    assert found == [16, 32, count]


@pytest.mark.live
def test_what_others_wrote_there_is_written_over(index_settings: IndexSettings) -> None:
    client = redis.Redis.from_url(index_settings.url)
    base = f"{index_settings.key_prefix}:{{routers}}"
    for strange in ("view:one", "seeing", "moves"):
        with pair(index_settings) as (one, two):
            two.tell(RouterView())
            client.delete(f"{base}:{strange}")
            client.set(f"{base}:{strange}", "of somebody else")
            two.move([Move("s", PlaceId("w0"))])
            for _ in range(3):
                one.tell(RouterView((), (seen(),)))
            assert list(two.others().values()) == [RouterView((), (seen(),))], strange
    with pair(index_settings) as (one, two):
        one.tell(RouterView((), (seen(),)))
        for wrong in (b"", b"\xff", b"\x92\x01\x02", b"\x91" * 5_000):
            client.hset(f"{base}:view:one", "head", wrong)
            assert not two.others()
            one.tell(RouterView((), (seen(),)))
            assert two.others()
        client.hset(f"{base}:view:one", "s" + seen().tag, b"short")
        two.others()
    client.close()


@pytest.mark.live
def test_a_redis_that_lost_all_is_told_anew(own_redis_server: EmbeddedServer) -> None:
    index = IndexSettings(url=own_redis_server.url, request_timeout_s=1.0)
    client = redis.Redis.from_url(index.url)
    with pair(index) as (one, two):
        one.tell(RouterView((), (seen(), seen("t"))))
        client.flushall()
        one.tell(RouterView((), (seen(), seen("t"))))
        assert list(two.others().values()) == [RouterView((), (seen(), seen("t")))]
        client.close()
        own_redis_server.kill()
        with pytest.raises(IndexUnavailableError):
            one.tell(RouterView())
        with pytest.raises(IndexUnavailableError):
            two.others()
        own_redis_server.start()


def planted(
    client: redis.Redis, settings: IndexSettings, name: str, groups: object, sessions: object
) -> None:
    """Write a view as somebody else might."""
    base = f"{settings.key_prefix}:{{routers}}"
    client.hset(f"{base}:view:{name}", "head", msgspec.msgpack.encode([groups, sessions]))
    client.sadd(f"{base}:seeing", name)


def a_group(uses_per_s: float, of: int = 1) -> list[object]:
    return [of.to_bytes(32, "big"), uses_per_s, [0, b""], b"", "", ""]


def a_session(pages: int = 1, used_s: float = 0.0, moved_s: float = 0.0) -> list[object]:
    return ["t", "w0", [pages, bytes(32)], used_s, False, None, moved_s, 0, b"", ""]


@pytest.mark.live
def test_a_view_that_no_router_wrote_is_none(index_settings: IndexSettings) -> None:
    wrong: dict[str, tuple[list[object], list[object]]] = {
        "many groups": ([a_group(1.0, of) for of in range(MOST_GROUPS + 1)], []),
        "many sessions": ([], [a_session() for _ in range(MOST_SESSIONS + 1)]),
        "large": ([[b"x" * (2 << 20), *a_group(1.0)[1:]]], []),
        "pages": ([], [a_session(MOST_SESSION_PAGES + 1)]),
        "fewer than none": ([], [a_session(-1)]),
    }
    for strange in (math.inf, -math.inf, math.nan, 1e308):
        wrong[f"uses {strange}"] = ([a_group(strange)], [])
        wrong[f"used {strange}"] = ([], [a_session(used_s=strange)])
        wrong[f"moved {strange}"] = ([], [a_session(moved_s=strange)])
    wrong["uses below none"] = ([a_group(-1.0)], [])
    client = redis.Redis.from_url(index_settings.url)
    with pair(index_settings) as (one, two):
        one.tell(RouterView((), (seen(),)))
        for name, (groups, sessions) in wrong.items():
            planted(client, index_settings, name, groups, sessions)
        planted(client, index_settings, "right", [a_group(2.0)], [a_session()])
        told = two.others()
        assert sorted(told) == ["one", "right"]
        assert [group.uses_per_s for group in told["right"].groups] == [2.0]
    client.close()


@pytest.mark.live
def test_names_that_nobody_has_do_not_hide_a_router_for_long(index_settings: IndexSettings) -> None:
    client = redis.Redis.from_url(index_settings.url)
    names = f"{index_settings.key_prefix}:{{routers}}:seeing"
    with pair(index_settings) as (one, two):
        one.tell(RouterView((), (seen(),)))
        client.sadd(names, *(f"nobody {number}" for number in range(20_000)))
        at = int(client.info("stats")["total_net_output_bytes"])
        one.tell(RouterView((), (seen(),)))
        two.others()
        read = int(client.info("stats")["total_net_output_bytes"]) - at
        assert read < 64 << 10, "no more are read at once than there may be"
        client.delete(names)
        client.sadd(names, *(f"nobody {number}" for number in range(4 * MOST_ROUTERS)))
        for _ in range(8):
            one.tell(RouterView((), (seen(),)))
            two.others()
        assert list(two.others()) == ["one"]
    client.close()

"""Versions of policies in a real Redis, and places that follow them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import cast

import msgspec
import pytest
import redis

from pie.index import policy_follower
from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PlacePolicies, PolicyKeys, PolicyStore, PolicyVersion
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from tests.index.places import WITHIN_S
from tests.support.redis_server import index_settings, own_redis_server, redis_server, redis_url

__all__ = ["index_settings", "own_redis_server", "redis_server", "redis_url"]

pytestmark = pytest.mark.live


@pytest.fixture
def store(index_settings: IndexSettings) -> Iterator[PolicyStore]:
    one = PolicyStore(index_settings.url, index_settings)
    yield one
    one.close()


class Follower:
    """A place that notes what it is told, and does not take what says `bad`."""

    def __init__(self, index: IndexSettings, place: str) -> None:
        self.taken: list[tuple[int, str | None]] = []
        self.tried = 0
        self.follower = PolicyFollower(index.url, place, self._take, settings=index)

    async def _take(self, number: int, version: PolicyVersion) -> str:
        self.tried += 1
        if version.text == "raise" or (version.text == "fails twice" and self.tried < 3):
            raise RuntimeError("a bug")
        if version.text == "bad":
            return "it is bad"
        self.taken.append((number, version.text))
        return ""


@pytest.fixture
async def follow(
    index_settings: IndexSettings,
) -> AsyncIterator[Callable[[str], Follower]]:
    made: list[Follower] = []

    def follow(place: str) -> Follower:
        made.append(Follower(index_settings, place))
        return made[-1]

    yield follow
    for one in made:
        await one.follower.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110 - another task makes it so
            await asyncio.sleep(0.02)


def test_versions_are_numbered_from_one_and_the_latest_hundred_are_kept(
    store: PolicyStore,
) -> None:
    assert store.current() == 0
    assert store.versions() == {}
    for number in range(1, 104):
        assert store.apply(f"text {number}", "note") == number
    assert store.current() == 103
    assert list(store.versions()) == list(range(4, 104))
    assert store.version(3) is None
    kept = store.version(103)
    assert kept is not None
    assert (kept.text, kept.note) == ("text 103", "note")


def test_an_edit_is_refused_whatever_is_said_of_it(store: PolicyStore) -> None:
    store.refuse("a \udc80 name", ["half a \ud800 letter", "x" * 1_000_000])
    refused = store.refused()
    assert refused is not None
    assert refused.file == "a \\udc80 name"
    first, second = refused.problems
    assert first == "half a \\ud800 letter"
    assert second == "x" * len(second)
    assert len(second) == 2_000


def test_versions_are_listed_without_their_texts_and_are_bounded_in_bytes(
    own_redis_server: EmbeddedServer,
) -> None:
    store = PolicyStore(own_redis_server.url)
    text = "#" * 1_000_000
    for _ in range(20):
        store.apply(text, "note")
    with redis.Redis.from_url(own_redis_server.url) as client:
        before = client.info("stats")["total_net_output_bytes"]
        listed = store.versions()
        told = client.info("stats")["total_net_output_bytes"] - before
    assert list(listed) == list(range(5, 21)), "16 MiB are kept"
    assert {one.text_bytes for one in listed.values()} == {len(text)}
    assert told < 100_000
    assert store.apply("x", "") == 21
    assert list(store.versions()) == list(range(5, 22))
    store.close()


async def test_a_version_without_a_digest_beside_it_is_followed(
    store: PolicyStore, index_settings: IndexSettings, follow: Callable[[str], Follower]
) -> None:
    one = follow("w0")
    await one.follower.start()
    store.apply("first", "note")
    await until(lambda: one.taken == [(1, "first")])
    keys = PolicyKeys(index_settings.key_prefix)
    with redis.Redis.from_url(index_settings.url) as client:
        head = cast(bytes, client.hget(keys.heads, "1"))
        raw = cast(bytes, client.hget(keys.versions, "1"))
        assert head[:40] == hashlib.sha1(raw, usedforsecurity=False).hexdigest().encode()
        client.delete(keys.heads)
        store.apply("second", "")
        await until(lambda: one.taken[-1] == (2, "second"))
        assert len(one.taken) == 2
        # Whatever is told is taken once, not twice a second.
        client.hset(keys.heads, "2", "junk")
        await until(lambda: len(one.taken) == 3)
        store.apply("third", "")
        await until(lambda: one.taken[-1] == (3, "third"))
    assert len(one.taken) == 4


async def test_every_place_takes_on_what_comes_into_force_and_says_so(
    store: PolicyStore, follow: Callable[[str], Follower]
) -> None:
    first, other = follow("w0"), follow("w1")
    await first.follower.start()
    assert first.taken == []
    assert store.places() == {"w0": PlacePolicies(0)}
    store.apply("one", "")
    await other.follower.start()
    assert other.taken == [(1, "one")], "one that starts takes on what is in force"
    await until(lambda: first.taken == [(1, "one")])
    await until(lambda: store.places() == {"w0": PlacePolicies(1), "w1": PlacePolicies(1)})
    store.apply(None, "rollback")
    await until(lambda: first.taken[-1] == (2, None))


async def test_what_a_place_does_not_take_is_told_and_leaves_it_as_it_was(
    store: PolicyStore, follow: Callable[[str], Follower]
) -> None:
    one = follow("w0")
    await one.follower.start()
    store.apply("good", "")
    await until(lambda: one.follower.state.version == 1)
    store.apply("bad", "")
    await until(lambda: one.follower.state.refused == 2)
    assert one.follower.state == PlacePolicies(1, 2, "it is bad")
    await until(lambda: store.places() == {"w0": PlacePolicies(1, 2, "it is bad")})
    store.apply("raise", "")
    store.apply("good again", "")
    await until(lambda: one.follower.state == PlacePolicies(4))
    assert one.taken == [(1, "good"), (4, "good again")]


async def test_what_fails_for_a_reason_of_the_place_is_told_and_tried_again(
    store: PolicyStore, follow: Callable[[str], Follower], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_follower, "_AGAIN_S", 0.1)
    one = follow("w0")
    await one.follower.start()
    store.apply("fails twice", "")
    await until(lambda: one.follower.state == PlacePolicies(0, 1, "RuntimeError: a bug"))
    await until(lambda: one.follower.state == PlacePolicies(1))
    assert one.taken == [(1, "fails twice")]
    store.apply("bad", "")
    await until(lambda: one.follower.state.refused == 2)
    assert not one.follower._is_due(), "a version that is not acceptable is not asked again"


def lose(index: IndexSettings, number: int, version: PolicyVersion | None) -> None:
    """Let Redis have one version and no other, or none, as if it had begun anew."""
    keys = PolicyKeys(index.key_prefix)
    with redis.Redis.from_url(index.url) as client, client.pipeline(transaction=True) as steps:
        steps.delete(keys.count, keys.versions, keys.heads)
        if version is not None:
            steps.set(keys.count, number)
            steps.hset(keys.versions, str(number), msgspec.json.encode(version))
        steps.execute()


async def test_a_redis_that_lost_its_versions_is_told_the_latest(
    store: PolicyStore, index_settings: IndexSettings, follow: Callable[[str], Follower]
) -> None:
    one, other = follow("w0"), follow("w1")
    await one.follower.start()
    store.apply("first", "")
    store.apply("second", "")
    await until(lambda: one.follower.state.version == 2)
    before = store.version(2)
    lose(index_settings, 0, None)
    await until(lambda: store.current() == 2)
    assert store.version(2) == before
    await other.follower.start()
    assert other.taken == [(2, "second")], "one that starts afterwards runs what the others do"
    lose(index_settings, 1, PolicyVersion("first", 1.0))
    await until(lambda: store.current() == 2)
    assert store.apply("third", "") == 3
    await until(lambda: one.taken[-1] == other.taken[-1] == (3, "third"))
    assert [number for number, _ in one.taken] == sorted({number for number, _ in one.taken})


async def test_what_somebody_else_wrote_in_a_key_s_stead_keeps_no_version_from_places(
    store: PolicyStore, index_settings: IndexSettings, follow: Callable[[str], Follower]
) -> None:
    keys = PolicyKeys(index_settings.key_prefix)
    one = follow("w0")
    await one.follower.start()
    store.apply("first", "")
    await until(lambda: one.taken == [(1, "first")])
    with redis.Redis.from_url(index_settings.url) as client:
        for name in (keys.places, keys.copies, keys.refused, keys.heads, keys.versions, keys.count):
            client.delete(name)
            client.lpush(name, "x")
        await until(lambda: client.type(keys.count) == b"string")
    # The latest version that a place knows of is Redis's again.
    await until(lambda: store.current() == 1)
    assert store.apply("second", "") == 2
    await until(lambda: one.taken[-1] == (2, "second"))
    await until(lambda: store.places() == {"w0": PlacePolicies(2)})
    assert list(store.versions()) == [1, 2]


async def test_who_has_left_is_listed_no_more_and_who_is_long_gone_is_forgotten(
    store: PolicyStore, index_settings: IndexSettings, follow: Callable[[str], Follower]
) -> None:
    keys = PolicyKeys(index_settings.key_prefix)
    with redis.Redis.from_url(index_settings.url) as client:
        client.hset(keys.places, mapping={"long gone": "1 {}", "strange": "x"})
        # Whose clock was set back since.
        client.hset(keys.places, "to come", f'{int(time.time()) + 86_400} {{"version":1}}')
        assert store.places() == {}
        one, other = follow("w0"), follow("w1")
        await one.follower.start()
        await other.follower.start()
        assert set(store.places()) == {"w0", "w1"}
        await one.follower.close()
        assert set(store.places()) == {"w1"}
        assert set(client.hkeys(keys.places)) == {b"w1", b"strange"}


async def test_closing_ends_where_a_cancellation_is_lost(
    store: PolicyStore, index_settings: IndexSettings
) -> None:
    takes = asyncio.Event()

    async def take(number: int, version: PolicyVersion) -> str:
        takes.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return ""

    follower = PolicyFollower(index_settings.url, "w0", take, settings=index_settings)
    await follower.start()
    store.apply("text", "")
    async with asyncio.timeout(WITHIN_S):
        await takes.wait()
        await follower.close()


@pytest.mark.parametrize("number", [1, 2])
async def test_what_is_applied_to_an_emptied_redis_is_new_whatever_its_number(
    store: PolicyStore,
    index_settings: IndexSettings,
    follow: Callable[[str], Follower],
    number: int,
) -> None:
    one = follow("w0")
    await one.follower.start()
    for at in range(number):
        store.apply(f"old {at}", "")
    await until(lambda: one.follower.state.version == number)
    lose(index_settings, 1, PolicyVersion("new", time.time() + 1))
    await until(lambda: one.taken[-1] == (1, "new"))
    await until(lambda: store.places()["w0"] == PlacePolicies(1))
    assert store.current() == 1

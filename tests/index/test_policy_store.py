"""Versions of policies in a real Redis, and places that follow them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from pie.index.policy_follower import PolicyFollower
from pie.index.policy_store import PlacePolicies, PolicyStore, PolicyVersion
from pie.index.settings import IndexSettings
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

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
        self.follower = PolicyFollower(index.url, place, self._take, settings=index)

    async def _take(self, number: int, version: PolicyVersion) -> str:
        if version.text == "raise":
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
    async with asyncio.timeout(10):
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

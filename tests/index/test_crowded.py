"""Far more names than places: what somebody else wrote into the list of places."""

import asyncio

import pytest

from pie.index import feed
from pie.index.lookup import DirectLookup
from pie.index.roll import NEW_AT_ONCE, Roll
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings
from pie.page.events import PlaceId
from tests.index.places import running, until

_GHOSTS = 50_000


def test_those_followed_are_asked_about_in_every_turn_and_all_others_in_some() -> None:
    roll = Roll()
    followed = {PlaceId("w0"), PlaceId("w1")}
    listed = {PlaceId(f"ghost{number:05}") for number in range(3 * NEW_AT_ONCE)} | followed
    left = listed - followed
    for _ in range(3):
        assert not roll.was_called
        turn = roll.turn(followed, listed)
        assert turn[:2] == ["w0", "w1"]
        assert len(turn) == NEW_AT_ONCE + 2
        left -= set(turn)
    assert not left
    assert roll.was_called
    assert roll.turn(followed, followed) == ["w0", "w1"]
    assert roll.turn(set(), {PlaceId("a")}) == ["a"]


@pytest.mark.live
async def test_a_list_crowded_with_names_of_nobody_keeps_no_place_from_being_followed(
    own_redis_server: EmbeddedServer,
) -> None:
    settings = IndexSettings(
        url=own_redis_server.url, ttl_s=5.0, poll_s=0.01, request_timeout_s=0.4
    )
    async with running(settings) as index:
        first = await index.join("w0", holding=10)
        await index.settled()
        names = [f"ghost{number}" for number in range(_GHOSTS)]
        await index.redis.sadd("pie:places", *names)
        first.store(99)
        await index.settled()
        lookup = DirectLookup(settings.url, settings=settings)
        assert set(await asyncio.to_thread(lookup.places)) == {"w0"}
        lookup.close()
        await index.join("x1", holding=10)
        await index.settled()
        assert await index.redis.scard("pie:places") < _GHOSTS / 2, "names of nobody are taken out"


@pytest.mark.live
async def test_more_places_than_can_be_followed_are_said_once(
    index_settings: IndexSettings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(feed, "MOST_PLACES", 2)
    async with running(index_settings) as index:
        for name in ("w0", "w1", "w2"):
            await index.join(name, holding=3)
        await until(lambda: len(index.mirror.places()) == 2, "two places")
        await until(lambda: "no more" in caplog.text, "the third is said to be left out")
        (left_out,) = index.places.keys() - index.mirror.places().keys()
        gone = next(name for name in index.places if name != left_out)
        await index.places.pop(gone).publisher.close()
        await index.settled()
        assert caplog.text.count("and no more") == 1

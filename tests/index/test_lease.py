"""One holder at a time."""

from __future__ import annotations

import logging
import time
import uuid

import pytest

from pie.index.client import make_client
from pie.index.errors import IndexUnavailableError
from pie.index.lease import Lease
from pie.index.server import EmbeddedServer
from pie.index.settings import IndexSettings

pytestmark = pytest.mark.live


def lease(settings: IndexSettings, holder: str, *, name: str = "x", ttl_s: float = 10) -> Lease:
    return Lease(settings.url, name, holder, ttl_s=ttl_s, settings=settings)


def test_the_second_is_told_who_holds_it(index_settings: IndexSettings) -> None:
    first, second = lease(index_settings, "a"), lease(index_settings, "b")
    assert first.keep() is None
    assert second.keep() == "a"
    assert first.keep() is None
    second.give_back()
    assert lease(index_settings, "c").keep() == "a"
    first.give_back()
    assert lease(index_settings, "c").keep() is None


def test_a_lease_that_is_not_kept_ends(index_settings: IndexSettings) -> None:
    assert lease(index_settings, "a", ttl_s=0.2).keep() is None
    time.sleep(0.3)
    assert lease(index_settings, "b").keep() is None


@pytest.mark.parametrize("left_s", [86_400, None], ids=["a day", "for ever"])
def test_a_lease_ends_whatever_became_of_the_clock(
    index_settings: IndexSettings, left_s: int | None
) -> None:
    assert lease(index_settings, "a").keep() is None
    key = f"{index_settings.key_prefix}:lease:x"
    with make_client(index_settings.url, index_settings) as client:
        client.set(key, "a", ex=left_s)
        assert lease(index_settings, "b").keep() == "a"
        assert 0 < client.ttl(key) <= 10


def test_names_and_prefixes_are_apart(index_settings: IndexSettings) -> None:
    assert lease(index_settings, "a").keep() is None
    assert lease(index_settings, "b", name="y").keep() is None
    other = index_settings.model_copy(update={"key_prefix": uuid.uuid4().hex})
    assert lease(other, "b").keep() is None


def test_what_somebody_else_has_written_in_its_stead_is_no_holder(
    index_settings: IndexSettings,
) -> None:
    held = lease(index_settings, "a")
    with make_client(index_settings.url, index_settings) as client:
        client.lpush(f"{index_settings.key_prefix}:lease:x", "b")
        held.give_back()
        assert lease(index_settings, "a").keep() is None
        assert client.get(f"{index_settings.key_prefix}:lease:x") == b"a"


@pytest.mark.parametrize("fault", ["full", "away"])
def test_a_lease_that_cannot_be_kept_is_said_once_and_when_it_can_again(
    own_redis_server: EmbeddedServer, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    caplog.set_level(logging.INFO, "pie.index.lease")
    settings = IndexSettings(url=own_redis_server.url)
    held = Lease(settings.url, "x", "a", settings=settings)
    assert held.renew() is None
    for times in (1, 2):
        if fault == "away":
            own_redis_server.kill()
        else:
            _limit(settings, 1)
        for _ in range(5):
            assert held.renew() is None
        assert len(caplog.records) == 2 * times - 1
        assert "cannot be kept" in caplog.records[-1].message
        if fault == "away":
            own_redis_server.start()
        else:
            _limit(settings, 0)
        for _ in range(5):
            assert held.renew() is None
        assert len(caplog.records) == 2 * times
        assert "kept again" in caplog.records[-1].message
    held.give_back()


def _limit(settings: IndexSettings, maxmemory: int) -> None:
    with make_client(settings.url, settings) as client:
        client.config_set("maxmemory", maxmemory)


def test_a_redis_that_is_away_is_said(own_redis_server: EmbeddedServer) -> None:
    held = Lease(own_redis_server.url, "x", "a")
    assert held.keep() is None
    own_redis_server.kill()
    with pytest.raises(IndexUnavailableError):
        held.keep()
    with pytest.raises(IndexUnavailableError):
        held.give_back()

"""A place's next start has a larger number than the last one, whatever the clock says."""

from __future__ import annotations

import pytest

from pie.index.contract import PlaceRecord
from pie.index.epochs import next_epoch
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PlaceId, PlaceKind
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

pytestmark = pytest.mark.live

PLACE = PlaceId("w0")


@pytest.fixture
async def known(index_settings: IndexSettings) -> Epoch:
    """The number of a start that Redis has heard of and that ended without a word."""
    record = PlaceRecord(PLACE, Epoch(1000), PlaceKind.WORKER, "ipc:///nowhere")
    publisher = Publisher(index_settings.url, record, lambda: (), settings=index_settings)
    await publisher.start()
    assert await publisher.flushed(60)
    publisher._fenced = True  # so that closing does not withdraw it
    await publisher.close()
    return record.epoch


async def test_a_clock_that_was_set_back_is_not_believed(
    known: Epoch, index_settings: IndexSettings
) -> None:
    assert await next_epoch(index_settings.url, index_settings, PLACE, clock_ns=lambda: 5) == 1001


async def test_it_is_the_time_where_that_is_later(
    known: Epoch, index_settings: IndexSettings
) -> None:
    url = index_settings.url
    assert await next_epoch(url, index_settings, PLACE, clock_ns=lambda: 5000) == 5000
    other = PlaceId("w1")
    assert await next_epoch(url, index_settings, other, clock_ns=lambda: 5) == 5


async def test_it_is_the_time_where_redis_is_away(index_settings: IndexSettings) -> None:
    url = "unix:///nonexistent/redis.sock"
    assert await next_epoch(url, index_settings, PLACE, clock_ns=lambda: 5) == 5

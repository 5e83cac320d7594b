"""Several routers at one Redis: each follows by itself, and all know the same."""

import pytest

from pie.index.conformance import key
from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from tests.index.places import running, until

pytestmark = pytest.mark.live


async def test_what_one_mirror_learns_of_a_page_the_other_learns_from_the_same_event(
    index_settings: IndexSettings,
) -> None:
    # Looks are so rare that nothing here can come by them.
    settings = index_settings.model_copy(update={"poll_s": 20.0, "ttl_s": 60.0})
    other = Mirror()
    async with running(index_settings) as index:
        place = await index.join("w0", holding=3)
        index.settings = settings
        feed = index.new_feed(other)
        await index.settled()
        await feed.start()
        await index.settled(other)
        reads = feed.resyncs, index.feed.resyncs
        mirrors = (index.mirror, other)
        for number in range(100, 120):
            place.store(number)
            await until(lambda: all(m.matches([key(number)]) for m in mirrors), "stored")  # noqa: B023
            place.remove(number)
            await until(lambda: not any(m.matches([key(number)]) for m in mirrors), "removed")  # noqa: B023
        assert (feed.resyncs, index.feed.resyncs) == reads, "both came as events"
        await index.settled()
        await index.settled(other)
        await feed.close()

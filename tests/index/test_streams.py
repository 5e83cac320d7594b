"""No answer of Redis is long, however many places are behind, and no place is passed over."""

from __future__ import annotations

import pytest

from pie.index.client import make_async_client
from pie.index.settings import IndexSettings
from pie.index.streams import EVENTS_AT_ONCE, waiter_for

pytestmark = pytest.mark.live


@pytest.mark.parametrize("places", [1, 4, EVENTS_AT_ONCE, 2 * EVENTS_AT_ONCE + 3])
async def test_places_that_are_behind_take_turns(
    index_settings: IndexSettings, places: int
) -> None:
    names = [f"{index_settings.key_prefix}:stream-{number}" for number in range(places)]
    client = make_async_client(index_settings.url)
    waiter = waiter_for(client)
    try:
        for name in names:
            for number in range(1, 41):
                await client.xadd(name, {"event": b"x"}, id=f"1-{number}")
        after = dict.fromkeys(names, "1-0")
        taken = 0
        while after:
            answer = await waiter.read(after, 1.0, 10.0)
            events = sum(len(found) for _, found in answer)
            commands = -(-places // EVENTS_AT_ONCE)
            assert 0 < events <= EVENTS_AT_ONCE * commands
            if places > EVENTS_AT_ONCE:
                assert len(answer) == len(after), "each of them that is behind has its turn"
            taken += events
            after |= {name.decode(): found[-1][0].decode() for name, found in answer}
            after = {name: last for name, last in after.items() if last != "1-40"}
        assert taken == 40 * places
        assert not await waiter.read(dict.fromkeys(names, "1-40"), 0.01, 10.0)
    finally:
        await waiter.close()
        await client.aclose()

"""Somebody else writes over keys of policies: what can be read is told, and the table is written anew."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import cast

import msgspec
import pytest
import redis

from pie.index.errors import IndexStrangeError
from pie.index.mirror import Mirror
from pie.index.orders import (
    CopiesTable,
    LoggedEvent,
    Orders,
    WantedWorkers,
    read_event,
    read_table,
    read_wanted,
)
from pie.index.policy_store import PolicyKeys, PolicyStore, read_count, read_refused
from pie.index.settings import IndexSettings
from pie.policies.policy_set import PolicySet
from pie.router.conductor import Conductor
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.ordering import Ordering
from pie.router.overview import Overview
from tests.index.places import WITHIN_S
from tests.support.redis_server import index_settings, redis_server, redis_url

__all__ = ["index_settings", "redis_server", "redis_url"]

DEEP = b'{"x":' + b"[" * 100_000 + b"}"
JUNK_TABLES = [
    b"{not json",
    b'{"seq":1,"copies":{"zz":2}}',
    b'{"seq":1,"copies":{"11":-1}}',
    b'{"seq":-5,"copies":{}}',
    DEEP,
    b"",
]


@pytest.mark.parametrize("raw", JUNK_TABLES)
def test_what_is_no_table_counts_as_none_and_is_told_from_it(raw: bytes) -> None:
    assert read_table(raw).by_key() == {}
    assert not read_table(raw).readable
    assert read_table(None).readable
    assert read_table(b'{"seq":1,"copies":{"11":2}}').by_key() == {b"\x11": 2}


def test_what_is_no_hint_is_left_out(index_settings: IndexSettings, client: redis.Redis) -> None:
    good = WantedWorkers(3, "busy", "by-load")
    assert read_wanted(msgspec.json.encode({"m": good})) == {"m": good}
    for raw in (None, b"", b"{not json", b'{"m": 3}', b"[]", DEEP):
        assert read_wanted(raw) == {}
    mixed = {
        "m": good,
        "fewer than none": WantedWorkers(-1, "r", "p"),
        "too many": WantedWorkers(1 << 40, "r", "p"),
        "too long": WantedWorkers(1, "r" * 1_000, "p"),
        "m" * 1_000: good,
    }
    assert read_wanted(msgspec.json.encode(mixed)) == {"m": good}
    assert len(read_wanted(msgspec.json.encode({str(at): good for at in range(5_000)}))) == 256
    orders, key = Orders(index_settings.url, index_settings), PolicyKeys(index_settings.key_prefix)
    client.sadd(key.wanted, "of somebody else")
    assert orders.wanted() == {}
    orders.set_wanted({"m": good})
    assert orders.wanted() == {"m": good}
    assert 0 < client.ttl(key.wanted) <= 30
    orders.close()


def test_what_is_no_event_edit_or_count_is_none() -> None:
    good = LoggedEvent(1.0, "p", "done", "", 0, "r")
    assert read_event(msgspec.json.encode(good)) == good
    for raw in (b"", b"{", b'{"at_unix_s":1e300}', DEEP):
        assert read_event(raw) is None
        assert read_refused(raw) is None
    late = msgspec.json.encode(msgspec.structs.replace(good, at_unix_s=1e300))
    assert read_event(late) is None
    keys = PolicyKeys("pie")
    assert read_count(b"7", keys) == 7
    with pytest.raises(IndexStrangeError, match=r"pie:\{policies\}:count in Redis is 'x' and no"):
        read_count(b"x", keys)


@pytest.fixture
def client(index_settings: IndexSettings) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(index_settings.url) as client:
        yield client


@pytest.mark.live
def test_bad_entries_are_left_out(index_settings: IndexSettings, client: redis.Redis) -> None:
    keys = PolicyKeys(index_settings.key_prefix)
    orders, store = (
        Orders(index_settings.url, index_settings),
        PolicyStore(index_settings.url, index_settings),
    )
    try:
        for at in range(50):
            orders.log([LoggedEvent(float(at), "p", "done", "", 0, "r")])
            client.xadd(keys.events, {"event": "{"})
            client.xadd(keys.events, {"other": "x"})
        client.xadd(keys.events, {"event": b"x" * (2 << 20)})
        found = orders.events(1_000)
        assert [event.at_unix_s for event in found] == [float(at) for at in range(49, -1, -1)]
        orders.log([LoggedEvent(1.0, "p", "done", "", 0, "r" * 400_000)] * 4)
        assert len([one for one in orders.events(1_000) if len(one.reason) > 1]) == 2
        store.apply("text", "note")
        client.hset(keys.versions, mapping={"x": "{}", "2": "{", "3": '{"text":1}'})
        client.hset(
            keys.heads, mapping={"x": "{}", "2": "{", "3": '0 0 {"text":1}', "4": b"\xff" * 9}
        )
        client.hset(keys.places, mapping={"a": "", "b": "x {}", "c": "99999999999999 {"})
        client.hset(keys.places, b"\xff", '99999999999999 {"version":1}')
        assert list(store.versions()) == [1]
        assert store.version(2) is None
        assert store.apply("other", "note") == 2
        assert list(store.versions()) == [1, 2]
        assert store.places() == {}
        client.set(keys.count, "x")
        with pytest.raises(IndexStrangeError, match="no version's number"):
            store.current()
    finally:
        orders.close()
        store.close()


@pytest.mark.live
async def test_a_table_that_cannot_be_read_is_written_anew_and_told_once(
    index_settings: IndexSettings, client: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    keys = PolicyKeys(index_settings.key_prefix)
    client.lpush(keys.copies, "x")
    conductor = Conductor(
        index_settings.url,
        "router",
        Overview(Mirror(), dict, Demand(), Conversations()),
        Ordering(dict),
        PolicySet(),
        settings=index_settings,
    )
    conductor.start()
    try:
        for junk in (None, b"{not json", b'{"seq":1,"copies":{"zz":2}}'):
            if junk is not None:
                client.set(keys.copies, junk)
            async with asyncio.timeout(WITHIN_S):
                while client.type(keys.copies) != b"string" or not _table(client, keys).readable:  # noqa: ASYNC110 - Redis tells nobody
                    await asyncio.sleep(0.05)
    finally:
        await conductor.close()
    assert caplog.text.count("the table of copies in Redis cannot be read") == 3


@pytest.mark.live
def test_a_table_is_not_set_over_one_that_has_come_since(
    index_settings: IndexSettings, client: redis.Redis
) -> None:
    one, other = (Orders(index_settings.url, index_settings) for _ in range(2))
    old = one.table()
    assert other.set_table(CopiesTable(1, {"11": 2}), other.table())
    assert not one.set_table(CopiesTable(1, {"22": 2}), old)
    assert one.table() == CopiesTable(1, {"11": 2})
    assert one.set_table(CopiesTable(2, {"22": 2}), one.table())
    key = PolicyKeys(index_settings.key_prefix).copies
    client.set(key, '{"seq": 1e300, "copies": {}}')
    assert one.set_table(CopiesTable(0, {}), one.table()), "what cannot be read is written over"
    client.set(key, DEEP)
    assert one.set_table(CopiesTable(1, {}), CopiesTable(0, {}))
    for orders in (one, other):
        orders.close()


def _table(client: redis.Redis, keys: PolicyKeys) -> CopiesTable:
    return read_table(cast(bytes, client.get(keys.copies)))

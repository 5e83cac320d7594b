"""Orders of cluster policies in Redis, and the log of what became of them.

Covers the table of groups that more pool nodes keep than usual, how many workers models should have, and events. Does not cover who orders
(`pie.router.conductor`) or following the table (`pie.index.policy_follower`).

    <prefix>:{policies}:copies   what `CopiesTable` holds, as JSON
    <prefix>:{policies}:wanted   by model what `WantedWorkers` holds, as JSON; forgotten half a minute after it was last set
    <prefix>:{policies}:events   stream: the latest 1,000 events, each as JSON
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import cast

import msgspec
import redis

from pie.index.client import make_client, translated
from pie.index.errors import IndexStrangeError
from pie.index.policy_store import LATEST_UNIX_S, PolicyKeys
from pie.index.settings import IndexSettings
from pie.page.key import PageKey

_MOST_EVENTS = 1_000
_MOST_BYTES = 1 << 20
"""Of events that are returned at once."""
_AT_ONCE = 20
_MOST_COPIES = 1_000_000
"""More than a table has copies of a group, whoever wrote it."""
_MOST_SEQ = 1 << 62
_TABLE_TTL_S = 600
"""A table that no router keeps any more is forgotten: pages have the usual copies again."""
_WANTED_TTL_S = 30
_MOST_WORKERS = 1_000_000
"""More than anybody hints, whoever wrote it."""
_MOST_HINTS = 256
_MOST_CHARS = 400


_SET_TABLE = """
local raw = redis.pcall('GET', KEYS[1])
local is_read, now = pcall(cjson.decode, type(raw) == 'string' and raw or '')
local before = tonumber(ARGV[3])
-- What could not be read is written over whatever it is.
if before >= 0 and is_read and type(now) == 'table' and type(now.seq) == 'number' and now.seq > before then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""


class CopiesTable(msgspec.Struct, frozen=True):
    """Which groups have more copies than usual."""

    seq: int
    copies: dict[str, int]
    """By the group's key in hexadecimal."""

    @property
    def readable(self) -> bool:
        """Whether this is what was written; otherwise it stands for something else that was there."""
        return self.seq >= 0

    def by_key(self) -> dict[PageKey, int]:
        """Return the table by key."""
        return {PageKey(bytes.fromhex(group)): count for group, count in self.copies.items()}


NO_COPIES = CopiesTable(0, {})
_UNREADABLE = CopiesTable(-1, {})


class WantedWorkers(msgspec.Struct, frozen=True):
    """How many workers a model should have, as a cluster policy hints."""

    workers: int
    reason: str
    policy: str


class LoggedEvent(msgspec.Struct, frozen=True):
    """What a cluster policy ordered, and what became of it."""

    at_unix_s: float
    policy: str
    action: str
    group: str
    """Its key in hexadecimal; empty where it is about none."""
    copies: int
    reason: str
    place: str = ""
    """The place that an order about pages or a conversation was for; empty where it was for none."""
    pages: int = 0
    model: str = ""
    """The model that a hint was about that was given, or lapsed; empty where it is none."""
    workers: int = 0
    """How many workers that should have; 0 of a hint that lapsed."""


class Orders:
    """The table and the log. Blocks; for one thread.

    Every method raises `PageIndexError` where Redis does not do it.
    """

    def __init__(self, url: str, settings: IndexSettings | None = None) -> None:
        settings = settings or IndexSettings()
        self._client: redis.Redis = make_client(url, settings)
        keys = PolicyKeys(settings.key_prefix)
        self._copies, self._events, self._wanted = keys.copies, keys.events, keys.wanted

    def table(self) -> CopiesTable:
        """Return the table in force."""
        try:
            with translated():
                raw = cast(bytes | None, self._client.get(self._copies))
        except IndexStrangeError:
            return _UNREADABLE
        return read_table(raw)

    def set_table(self, table: CopiesTable, before: CopiesTable) -> bool:
        """Put a table in force, for as long as it is set again in time; return whether it is.

        It is not where another has come into force since `before` was read, as of a router that leads by now.
        """
        with translated():
            is_set = self._client.eval(
                _SET_TABLE,
                1,
                self._copies,
                msgspec.json.encode(table),
                str(_TABLE_TTL_S),
                str(before.seq),
            )
        return bool(is_set)

    def wanted(self) -> dict[str, WantedWorkers]:
        """Return by model how many workers it should have; nothing where nobody has said so lately."""
        try:
            with translated():
                raw = cast(bytes | None, self._client.get(self._wanted))
        except IndexStrangeError:
            return {}
        return read_wanted(raw)

    def set_wanted(self, wanted: Mapping[str, WantedWorkers]) -> None:
        """Say how many workers models should have, for the next half minute."""
        with translated():
            self._client.set(self._wanted, msgspec.json.encode(wanted), ex=_WANTED_TTL_S)

    def log(self, events: Sequence[LoggedEvent]) -> None:
        """Add to the log."""
        with translated():
            pipe = self._client.pipeline(transaction=False)
            for event in events:
                fields = {"event": msgspec.json.encode(event)}
                pipe.xadd(self._events, fields, maxlen=_MOST_EVENTS)  # type: ignore[arg-type]
            pipe.execute()

    def events(self, most: int) -> list[LoggedEvent]:
        """Return those of the latest `most` events that can be read, the newest first, of 1 MiB together."""
        found: list[LoggedEvent] = []
        newest, room = "+", _MOST_BYTES
        for at in range(0, most, _AT_ONCE):
            with translated():
                some = self._client.xrevrange(
                    self._events, max=newest, count=min(_AT_ONCE, most - at)
                )
            entries = cast(list[tuple[bytes, dict[bytes, bytes]]], some)
            for name, fields in entries:
                newest, raw = f"({name.decode()}", fields.get(b"event", b"")
                event = read_event(raw) if len(raw) <= room else None
                if event is not None:
                    room -= len(raw)
                    found.append(event)
            if len(entries) < _AT_ONCE:
                break
        return found

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def read_table(raw: bytes | str | None) -> CopiesTable:
    """Return a table as it was written; none as an empty one, and what is no table as one that is not `readable`."""
    if raw is None:
        return NO_COPIES
    try:
        table = msgspec.json.decode(raw, type=CopiesTable)
        groups = table.by_key()
    except (ValueError, RecursionError):
        return _UNREADABLE
    good = all(0 < copies <= _MOST_COPIES for copies in groups.values())
    return table if good and 0 <= table.seq < _MOST_SEQ else _UNREADABLE


def read_wanted(raw: bytes | str | None) -> dict[str, WantedWorkers]:
    """Return hints as they were written, without what cannot be one and what is more than anybody writes."""
    try:
        found = msgspec.json.decode(raw, type=dict[str, WantedWorkers]) if raw else {}
    except (ValueError, RecursionError):
        return {}
    good = {
        model: one
        for model, one in found.items()
        if 0 <= one.workers <= _MOST_WORKERS
        and max(map(len, (model, one.reason, one.policy))) <= _MOST_CHARS
    }
    return dict(islice(good.items(), _MOST_HINTS))


def read_event(raw: bytes | str) -> LoggedEvent | None:
    """Return an event as it was written; None where it is none."""
    try:
        event = msgspec.json.decode(raw, type=LoggedEvent)
    except (ValueError, RecursionError):
        return None
    return event if 0 <= event.at_unix_s <= LATEST_UNIX_S else None

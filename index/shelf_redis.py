"""A shelf in Redis, which all routers read and fill.

Covers the scripts and their answers. Does not cover what is meant by them (`pie.index.shelf`), parts
(`pie.index.shelf_parted`) or encryption (`pie.index.shelf_sealed`).

    <prefix>:{shelf:<shelf>}:values   hash: name → value
    <prefix>:{shelf:<shelf>}:order    sorted set: name → when it was put, or used, in Redis's milliseconds; later
                                      ones are larger where that clock is set back
    <prefix>:{shelf:<shelf>}:bytes    string: what all entries take

Old entries are removed a few at a time, by `put` and by `trim`, which each router calls now and then: to let a
hundred thousand go at once keeps Redis busy for some 50 ms. All three keys expire together an hour after the last
entry could be young enough, where no router is left to remove them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

from pie.index.commons import NOW, Argument, Commons
from pie.index.errors import PageIndexError
from pie.index.shelf import ENTRY_BYTES, Latest, ShelfLimits, entry_bytes

MOST_VALUE_BYTES = 4 << 20
"""Redis works on a larger one for longer than it may keep others waiting."""
LINGER_S = 3600.0
"""How much longer than a value may be kept the keys are there, for routers to remove what is old in steps."""
_MOST_AT_ONCE = 64
_BATCH_BYTES = 1 << 20
_MOST_ROUNDS = 64
_MOST_FORGOTTEN = 128
"""Two milliseconds of Redis, at 17 µs each."""
_PAUSE_S = 0.005
"""Others have their turn, and Redis time to give memory back."""
_FORGOTTEN_BYTES = 4 << 20
"""Redis gives a megabyte back to the system in some 50 µs."""

_BEGIN = (
    NOW
    + f"""
local entry_bytes, most_entry_bytes = {ENTRY_BYTES}, {MOST_VALUE_BYTES}
"""
    + """
-- KEYS values, order, bytes
local kinds = {'hash', 'zset', 'string'}
local missing, strange = 0, false
for i = 1, 3 do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind == 'none' then missing = missing + 1
  elseif kind ~= kinds[i] then strange = true end
end
local last = 0
if missing == 0 and not strange then
  local count, said = redis.call('ZCARD', KEYS[2]), redis.call('GET', KEYS[3])
  last = tonumber(redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]) or 0
  local bytes = #said < 16 and string.match(said, '^%d+$')
  bytes = tonumber(bytes or '-1')
  strange = bytes < count * entry_bytes or bytes > count * most_entry_bytes
    or redis.call('HLEN', KEYS[1]) ~= count or last >= 2 ^ 53
end
-- What somebody else wrote, or a Redis has dropped in part, says nothing.
if strange or (missing > 0 and missing < 3) then
  redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3])
  last = 0
end
"""
)

_STAMP = """
-- Later than all that is there, whatever became of the clock: what was put last is forgotten last.
local function stamp()
  if last > now then return string.format('%.0f', last + 1) end
  return string.format('%.0f', now)
end
"""

_DROP = """
local function drop(name, bytes)
  local size = redis.call('HSTRLEN', KEYS[1], name)
  if redis.call('HDEL', KEYS[1], name) == 1 then
    bytes = bytes - size - #name - entry_bytes
  end
  redis.call('ZREM', KEYS[2], name)
  return bytes
end
"""

_PUT = (
    _BEGIN
    + _STAMP
    + _DROP
    + """
-- ARGV ttl ms, most, bytes of all, ms that keys are there, how many and how many bytes may be
--      forgotten in a step, then names and values
local ttl, most, budget = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local rounds, step = tonumber(ARGV[5]), tonumber(ARGV[6])
local bytes = tonumber(redis.call('GET', KEYS[3]) or '0') or 0
-- Redis looks only at a script's first write whether it is full, and only where that adds something.
local at = now
if #ARGV > 6 then
  redis.call('SET', KEYS[3], string.format('%d', bytes))
  at = stamp()
end
for i = 7, #ARGV, 2 do
  bytes = drop(ARGV[i], bytes) + #ARGV[i] + #ARGV[i + 1] + entry_bytes
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[2], at, ARGV[i])
end
local more, begun = 0, bytes
for round = 1, rounds do
  local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
  if not first[1] then break end
  local count = redis.call('ZCARD', KEYS[2])
  if tonumber(first[2]) + ttl > now and count <= most and bytes <= budget then break end
  bytes = drop(first[1], bytes)
  if round == rounds or begun - bytes >= step then
    more = 1
    break
  end
end
if redis.call('ZCARD', KEYS[2]) > 0 then
  if #ARGV > 6 or bytes ~= begun then redis.call('SET', KEYS[3], string.format('%d', bytes)) end
  for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
else redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3]) end
return more
"""
)

_GET = (
    _BEGIN
    + _STAMP
    + """
-- ARGV name, ttl ms, whether use counts, ms that keys are there
local at = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not at or tonumber(at) + tonumber(ARGV[2]) <= now then return false end
if ARGV[3] == '1' then
  redis.call('ZADD', KEYS[2], stamp(), ARGV[1])
  for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[4]) end
end
return redis.call('HGET', KEYS[1], ARGV[1])
"""
)

_LATEST = (
    _BEGIN
    + """
-- ARGV most
local names = redis.call('ZREVRANGE', KEYS[2], 0, tonumber(ARGV[1]) - 1, 'WITHSCORES')
return {names, redis.call('ZCARD', KEYS[2]), tonumber(redis.call('GET', KEYS[3]) or '0') or 0}
"""
)


class RedisShelf:
    """A shelf that all routers of a cluster share.

    Args:
        commons: Redis.
        name: The shelf's.
        limits: How much it keeps.
    """

    def __init__(self, commons: Commons, name: str, limits: ShelfLimits) -> None:
        self._commons = commons
        self._limits = limits
        base = f"{commons.prefix}:{{shelf:{name}}}"
        self._keys = [f"{base}:values", f"{base}:order", f"{base}:bytes"]

    async def put(self, values: Sequence[tuple[str, bytes]]) -> None:
        """Do as `Shelf.put` says."""
        if not self._limits.most:
            return
        for some in _batches([one for one in values if self.takes(*one)]):
            if await self._step([part for one in some for part in one]):
                await self._trim_after()

    def takes(self, name: str, value: bytes) -> bool:
        """Do as `Shelf.takes` says."""
        return bool(self._limits.most) and entry_bytes(name, value) <= self._most_bytes

    async def trim(self) -> None:
        """Remove what is old, or more than is kept: some thousand values at most.

        Raises:
            PageIndexError: Nobody knows.
        """
        for _ in range(_MOST_ROUNDS):
            if not await self._step([]):
                return
            await asyncio.sleep(_PAUSE_S)

    async def _trim_after(self) -> None:
        # What was put is kept whether or not there is more to forget now; routers trim every few seconds.
        with contextlib.suppress(PageIndexError):
            await self.trim()

    async def _step(self, values: Sequence[str | bytes]) -> bool:
        """Put names and values, and forget some; say whether there is more to forget."""
        limits = self._limits
        args: list[Argument] = [
            int(limits.ttl_s * 1000),
            limits.most,
            limits.budget_bytes,
            self._there_ms,
            _MOST_FORGOTTEN,
            _FORGOTTEN_BYTES,
            *values,
        ]
        return bool(await self._commons.call(_PUT, self._keys, args))

    async def get(self, name: str) -> bytes | None:
        """Do as `Shelf.get` says."""
        ttl_ms, by_use = int(self._limits.ttl_s * 1000), int(self._limits.by_use)
        args: list[Argument] = [name, ttl_ms, by_use, self._there_ms]
        return cast(bytes | None, await self._commons.call(_GET, self._keys, args))

    async def latest(self, most: int) -> Latest:
        """Do as `Shelf.latest` says."""
        found, count, used_bytes = await self.latest_at(most)
        return Latest([name for _, name in found], count, used_bytes)

    async def latest_at(self, most: int) -> tuple[list[tuple[float, str]], int, int]:
        """Return what `latest` does, each name with when it was put or used, in milliseconds.

        Raises:
            PageIndexError: Nobody knows.
        """
        said = await self._commons.call(_LATEST, self._keys, [most])
        flat, count, used_bytes = cast(tuple[list[bytes], int, int], said)
        names = [name.decode(errors="replace") for name in flat[::2]]
        return list(zip(map(float, flat[1::2]), names, strict=True)), count, used_bytes

    @property
    def _there_ms(self) -> int:
        return int((self._limits.ttl_s + LINGER_S) * 1000)

    @property
    def _most_bytes(self) -> int:
        return min(MOST_VALUE_BYTES, self._limits.budget_bytes)


def _batches(values: Sequence[tuple[str, bytes]]) -> Iterator[list[tuple[str, bytes]]]:
    """Cut values into what Redis takes in one step."""
    batch: list[tuple[str, bytes]] = []
    size = 0
    for one in values:
        if batch and (len(batch) == _MOST_AT_ONCE or size + entry_bytes(*one) > _BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += entry_bytes(*one)
    if batch:
        yield batch

"""What each router has counted, as it tells all others.

Covers telling and hearing, in Redis. Does not cover what is counted, or adding up (`pie.router.sums`).

    <prefix>:{routers}:counts   hash: router → Redis's time in milliseconds, a space, `Tally` as JSON

A router tells once a second, and hears when somebody asks. One that has told nothing for `TTL_S` is left out.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, cast

import msgspec

from pie.index.commons import NOW, Argument, Commons
from pie.index.router_views import MOST_ROUTERS, TTL_S

MOST_BYTES = 64 << 10
"""Of one tally: so many are what 2,000 workers take. Of a larger one the workers are left out."""

_TELL = (
    NOW
    + """
-- KEYS counts; ARGV router, tally, ms until it is forgotten
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then redis.call('UNLINK', KEYS[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%d ', now) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
)
_HEAR = (
    NOW
    + """
-- KEYS counts; ARGV router, ms until one is forgotten, most routers, most bytes of one
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' then return {} end
local all, found = redis.call('HGETALL', KEYS[1]), {}
for at = 1, #all, 2 do
  local told, tally = string.match(all[at + 1], '^(%d+) (.*)$')
  -- Told later than now is told before the clock was set back.
  if not told or #tally > tonumber(ARGV[4]) or math.abs(now - tonumber(told)) > tonumber(ARGV[2]) then
    redis.call('HDEL', KEYS[1], all[at])
  elseif all[at] ~= ARGV[1] and #found < tonumber(ARGV[3]) then
    table.insert(found, tally)
  end
end
return found
"""
)
_WITHDRAW = """
if redis.call('TYPE', KEYS[1]).ok == 'hash' then redis.call('HDEL', KEYS[1], ARGV[1]) end
return 1
"""

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]


class Tally(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one router has counted since its start; what one of another version does not tell is 0."""

    router: _Name
    """What it is called."""
    running: dict[_Name, _Count] = {}
    """Its sequences in decode, by worker; those of workers without any are left out."""
    in_flight: _Count = 0
    requests: _Count = 0
    prompt_tokens: _Count = 0
    cached_tokens: dict[_Name, _Count] = {}
    """By where they came from."""
    predicted_tokens: _Count = 0
    output_tokens: _Count = 0
    policy_failures: _Count = 0
    """Of the routing policy that it runs."""
    policy_version: _Count = 0
    """Of the policies that it runs, no count."""
    policy_refused: _Count = 0
    """The version that it could not take on."""


class Tallies:
    """The tallies of all routers, from one of them. For one event loop.

    Every method raises `PageIndexError` where Redis does not do it.

    Args:
        commons: Redis.
    """

    def __init__(self, commons: Commons) -> None:
        self._commons = commons
        self._keys = [f"{commons.prefix}:{{routers}}:counts"]

    async def tell(self, tally: Tally) -> None:
        """Say what this router has counted, instead of what it said before."""
        raw = msgspec.json.encode(tally)
        if len(raw) > MOST_BYTES:
            raw = msgspec.json.encode(msgspec.structs.replace(tally, running={}))
        await self._commons.call(_TELL, self._keys, [self._commons.router, raw, _TTL_MS])

    async def others(self) -> list[Tally]:
        """Return what the other routers that are there told last."""
        args: list[Argument] = [self._commons.router, _TTL_MS, MOST_ROUTERS, MOST_BYTES]
        raws = cast(list[bytes], await self._commons.call(_HEAR, self._keys, args))
        found = map(_decoded, islice(raws, MOST_ROUTERS))
        return [one for one in found if one is not None]

    async def withdraw(self) -> None:
        """Take back what this router said."""
        await self._commons.call(_WITHDRAW, self._keys, [self._commons.router])


_TTL_MS = int(TTL_S * 1000)


def _decoded(raw: bytes) -> Tally | None:
    """Return a tally as it was written; None where it is none."""
    try:
        return msgspec.json.decode(raw, type=Tally)
    except (ValueError, RecursionError):
        return None

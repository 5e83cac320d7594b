"""Allowances in Redis, which all routers draw from.

Covers the script and its answer. Does not cover what is meant by it (`pie.index.allowance`).

    <prefix>:{tenant:<name>}:allowance   hash: `requests` and `tokens` → what is left, when that was, of how
                                         many a minute; `by:<router>` → drawn requests, drawn tokens,
                                         sequences, until when those count

It expires by itself when nothing in it can matter any more: buckets are full by then.
"""

from __future__ import annotations

from typing import cast

from pie.index.allowance import HOLD_S, KEEP_S, Claim, Draw, Grant, Limits
from pie.index.commons import NOW, Commons

_CLAIM = (
    NOW
    + """
-- KEYS the tenant's hash
-- ARGV router, ms that sequences count, ms that it is remembered, then of requests and of tokens: a minute's
--      worth (0 for no limit), spent, drawn, need, spare; then of sequences: most, inside, need, spare
local key, router, hold, keep = KEYS[1], 'by:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local kind = redis.call('TYPE', key).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('UNLINK', key) end

local kept, mine, others = {}, nil, 0
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local name, value = all[i], all[i + 1]
  if string.sub(name, 1, 3) == 'by:' then
    local requests, tokens, sequences, till = string.match(value, '^(%d+) (%d+) (%d+) (%d+)$')
    till = tonumber(till)
    if till and till > now + hold then
      -- The clock was set back since: whoever says nothing any more counts as long as from now.
      till = now + hold
      redis.call('HSET', key, name, string.format('%s %s %s %d', requests, tokens, sequences, till))
    end
    if not till or till + keep < now then redis.call('HDEL', key, name)
    elseif name == router then mine = {tonumber(requests), tonumber(tokens)}
    elseif till > now then others = others + tonumber(sequences) end
  else kept[name] = value end
end

-- What a bucket has after what was spent is paid, and what is missing.
local function look(name, at, before)
  local most, spent, drawn = tonumber(ARGV[at]), tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local need, spare = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4])
  local found = {most = most, want = spent + need, spare = spare, drawn = before or drawn, wait = 0}
  local level, then_ms, had = string.match(kept[name] or '', '^(%-?[%d.]+) (%d+) ([%d.]+)$')
  level, then_ms, had = tonumber(level), tonumber(then_ms), tonumber(had)
  if not (level and then_ms and had) then level, then_ms, had = 0, now, 0 end
  found.level = math.min(most, level + math.max(0, now - then_ms) * most / 60000 + most - had)
  local owed = math.max(0, spent - found.drawn)
  found.drawn = found.drawn + owed
  if most == 0 then return found end
  found.level = found.level - owed
  local lack = found.want - found.drawn
  if lack > 0 then
    found.wait = math.max(0, math.ceil((math.min(lack, most) - found.level) * 60000 / most))
  end
  return found
end

local function give(bucket)
  local target = bucket.want + bucket.spare
  if bucket.most == 0 then bucket.drawn = bucket.want
  elseif bucket.drawn > target then
    bucket.level = math.min(bucket.most, bucket.level + bucket.drawn - target)
    bucket.drawn = target
  else
    local must = math.max(0, bucket.want - bucket.drawn)
    bucket.level = bucket.level - must
    local more = math.min(target - bucket.drawn - must, math.max(0, math.floor(bucket.level)))
    bucket.level = bucket.level - more
    bucket.drawn = bucket.drawn + must + more
  end
end

local requests = look('requests', 4, mine and mine[1])
local tokens = look('tokens', 9, mine and mine[2])
local most, inside = tonumber(ARGV[14]), tonumber(ARGV[15])
local need, spare = tonumber(ARGV[16]), tonumber(ARGV[17])
local fits = most == 0 or need == 0 or inside + need + others <= most
local given, sequences = 0, inside
if fits and requests.wait == 0 and tokens.wait == 0 then
  given = 1
  give(requests)
  give(tokens)
  sequences = math.max(inside + need, math.min(inside + need + spare, most - others))
end

local expires = keep
for name, bucket in pairs({requests = requests, tokens = tokens}) do
  if bucket.most > 0 then
    local left = string.format('%.6f %d %.6f', bucket.level, now, bucket.most)
    redis.call('HSET', key, name, left)
    local full = math.ceil((bucket.most - bucket.level) * 60000 / bucket.most)
    expires = math.max(expires, math.min(full, 86400000))
  elseif kept[name] then redis.call('HDEL', key, name) end
end
local said = string.format('%d %d %d %d', requests.drawn, tokens.drawn, sequences, now + hold)
redis.call('HSET', key, router, said)
redis.call('PEXPIRE', key, string.format('%d', expires + hold))
return {given, requests.drawn, tokens.drawn, sequences, requests.wait, tokens.wait, others}
"""
)


class RedisAllowances:
    """Allowances that all routers of a cluster share.

    Args:
        commons: Redis.
    """

    def __init__(self, commons: Commons) -> None:
        self._commons = commons

    async def claim(self, tenant: str, limits: Limits, claim: Claim) -> Grant:
        """Do as `Allowances.claim` says."""
        commons, sequences = self._commons, claim.sequences
        said = await commons.call(
            _CLAIM,
            [f"{commons.prefix}:{{tenant:{tenant}}}:allowance"],
            [
                commons.router,
                int(HOLD_S * 1000),
                int(KEEP_S * 1000),
                *_draw(limits.requests_per_minute, claim.requests),
                *_draw(limits.tokens_per_minute, claim.tokens),
                *(limits.concurrent, sequences.inside, sequences.need, sequences.spare),
            ],
        )
        given, requests, tokens, held, requests_ms, tokens_ms, others = cast(list[int], said)
        return Grant(
            bool(given), requests, tokens, held, requests_ms / 1000, tokens_ms / 1000, others
        )


def _draw(per_minute: float, draw: Draw) -> tuple[str, int, int, int, int]:
    return (f"{per_minute:.6f}", draw.spent, draw.drawn, draw.need, draw.spare)

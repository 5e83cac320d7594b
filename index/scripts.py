"""What Redis does in one step for a place: fill, announce, apply, withdraw.

Covers the scripts and their answers. Does not cover when they are called (`pie.index.remote`).

Epochs are compared as text, because a number in Lua is exact up to 2^53 only.
"""

from __future__ import annotations

import enum

from pie.page.events import PageEvent, PageStored, PlaceCleared, part_bit
from pie.page.key import KEY_BYTES

_BIT_BYTES = {1 << bit: bytes([bit]) for bit in range(32)}


class Answer(enum.Enum):
    """What a script says."""

    OK = b"ok"
    STALE = b"stale"
    """A later start of the place has been here: this one must be silent."""
    ANEW = b"anew"
    """Redis does not have what went before: the place must announce itself anew."""


_OLDER = """
local function older(a, b)
  -- Somebody else may have written there.
  if string.find(b, '%D') then return false end
  return #a < #b or (#a == #b and a < b)
end
"""

_STAY = """
local function stay(alive, epoch, ttl)
  -- A full Redis takes a new time to live, and no value.
  local said = redis.call('TYPE', alive).ok == 'string' and redis.call('GET', alive)
  if said == epoch then redis.call('PEXPIRE', alive, ttl)
  else redis.call('SET', alive, epoch, 'PX', ttl) end
end
"""

APPLY = (
    _OLDER
    + _STAY
    + """
-- KEYS record, pages, stream, alive
-- ARGV epoch, generation, first seq, alive ttl ms, other ttl ms, name of the oldest event to keep,
--      record, then for each event its changes, packed as `pack_changes` does, and the event for
--      readers
local epoch, generation, seq, pages, record =
  unpack(redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'seq', 'pages', 'record'))
if not epoch then return 'anew' end
if older(ARGV[1], epoch) then return 'stale' end
if epoch ~= ARGV[1] or generation ~= ARGV[2] then return 'anew' end
-- A Redis that drops keys when it is full may have dropped the pages alone.
if redis.call('HLEN', KEYS[2]) ~= tonumber(pages) then return 'anew' end
-- Before anything that a full Redis refuses: who cannot say what is new is alive all the same.
stay(KEYS[4], ARGV[1], ARGV[4])
for i = 1, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[5]) end
-- Somebody else may have written to the stream or over the record.
local kind = redis.call('TYPE', KEYS[3]).ok
if kind ~= 'stream' and kind ~= 'none' then return 'anew' end
if record ~= ARGV[7] then redis.call('HSET', KEYS[1], 'record', ARGV[7]) end
local have, first, events = tonumber(seq), tonumber(ARGV[3]), (#ARGV - 7) / 2
-- An answer that was lost makes a place say the same again.
local again = events > 0 and have == first + events - 1
if not again and have ~= first - 1 then return 'anew' end

local function change(packed)
  local keys, masks = {}, {}
  for at = 2, #packed, 33 do
    local key = string.sub(packed, at, at + 31)
    if not masks[key] then
      masks[key] = 0
      keys[#keys + 1] = key
    end
    masks[key] = bit.bor(masks[key], bit.lshift(1, string.byte(packed, at + 32)))
  end
  if #keys == 0 then return end
  local held = redis.call('HMGET', KEYS[2], unpack(keys))
  local set, gone = {}, {}
  for i, key in ipairs(keys) do
    local old = tonumber(held[i] or 0)
    local new
    if string.sub(packed, 1, 1) == '+' then
      new = bit.bor(old, masks[key])
    else
      new = bit.band(old, bit.bnot(masks[key]))
    end
    if new == 0 then
      gone[#gone + 1] = key
    elseif new ~= old then
      set[#set + 1] = key
      set[#set + 1] = string.format('%d', new)
    end
  end
  if #set > 0 then redis.call('HSET', KEYS[2], unpack(set)) end
  if #gone > 0 then redis.call('HDEL', KEYS[2], unpack(gone)) end
end

if not again then
  for i = 1, events do
    local packed = ARGV[6 + 2 * i]
    if packed == '0' then
      redis.call('UNLINK', KEYS[2])
    else
      change(packed)
    end
    local id = string.format('%s-%.0f', ARGV[1], first + i - 1)
    local added = redis.pcall('XADD', KEYS[3], 'MINID', '~', ARGV[6], id, 'event', ARGV[7 + 2 * i])
    if type(added) == 'table' and added.err then
      if string.sub(added.err, 1, 3) == 'OOM' then return added end
      -- Somebody else has written to the stream.
      return 'anew'
    end
  end
  if events > 0 then
    redis.call('HSET', KEYS[1], 'seq', string.format('%.0f', first + events - 1),
      'pages', redis.call('HLEN', KEYS[2]))
  end
end
for i = 2, 3 do redis.call('PEXPIRE', KEYS[i], ARGV[5]) end
return 'ok'
"""
)
"""Apply the next events of a place, or none to say that it is alive."""

FILL = (
    _OLDER
    + _STAY
    + """
-- KEYS record, pages of this announcement, alive
-- ARGV epoch, alive ttl ms, other ttl ms, a mask, keys of pages that have it, one after another
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and older(ARGV[1], epoch) then return 'stale' end
-- What was announced before stays alive until this replaces it.
stay(KEYS[3], ARGV[1], ARGV[2])
if epoch then redis.call('PEXPIRE', KEYS[1], ARGV[3]) end
local mask, keys, set = ARGV[4], ARGV[5], {}
for at = 1, #keys, 32 do
  set[#set + 1] = string.sub(keys, at, at + 31)
  set[#set + 1] = mask
end
redis.call('HSET', KEYS[2], unpack(set))
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 'ok'
"""
)
"""Write some pages of an announcement that does not count yet."""

ANNOUNCE = (
    _OLDER
    + """
-- KEYS record, pages of this announcement, pages of the one before, stream, alive
-- ARGV epoch, generation, generation before, seq, number of pages, record, alive ttl ms,
--      other ttl ms
local epoch, before, seq = unpack(redis.call('HMGET', KEYS[1], 'epoch', 'generation', 'seq'))
if epoch and older(ARGV[1], epoch) then return 'stale' end
-- This may arrive late, from a connection that was given up: after what was said since.
if epoch == ARGV[1] and (not seq or tonumber(seq) >= tonumber(ARGV[4])) then return 'anew' end
-- Redis may have lost what was written for this announcement so far.
if redis.call('HLEN', KEYS[2]) ~= tonumber(ARGV[5]) then return 'anew' end
if before and before == ARGV[3] and KEYS[2] ~= KEYS[3] then redis.call('UNLINK', KEYS[3]) end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'generation', ARGV[2], 'seq', ARGV[4],
  'pages', ARGV[5], 'record', ARGV[6])
local id = ARGV[1] .. '-' .. ARGV[4]
-- Events before it are of no use: whoever has not read them reads all.
local added = redis.pcall('XADD', KEYS[4], 'MINID', id, id, 'announced', ARGV[2])
if type(added) == 'table' and added.err then
  -- The stream is of a later start that has left since, or somebody else has written to it.
  redis.call('UNLINK', KEYS[4])
  redis.call('XADD', KEYS[4], id, 'announced', ARGV[2])
end
redis.call('SET', KEYS[5], ARGV[1], 'PX', ARGV[7])
redis.call('PEXPIRE', KEYS[1], ARGV[8])
redis.call('PEXPIRE', KEYS[2], ARGV[8])
redis.call('PEXPIRE', KEYS[4], ARGV[8])
return 'ok'
"""
)
"""Let the pages written under a new generation be those of the place."""

WITHDRAW = (
    _OLDER
    + """
-- KEYS record, pages, stream, alive
-- ARGV epoch, tombstone ttl ms
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and older(ARGV[1], epoch) then return 'stale' end
redis.call('UNLINK', KEYS[1], KEYS[2], KEYS[3], KEYS[4])
-- Readers tell a place that has left from one that Redis has lost.
redis.call('HSET', KEYS[1], 'epoch', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 'ok'
"""
)
"""Take a place out of the index; its epoch stays for a moment, so that readers know at once."""


def pack_changes(event: PageEvent) -> bytes:
    """Return what an event changes as `APPLY` reads it: a sign, then key and bit of each entry.

    Redis's msgpack knows no binary strings, so that it cannot read the event itself.
    """
    if isinstance(event, PlaceCleared):
        return b"0"
    parts = [b"+" if isinstance(event, PageStored) else b"-"]
    for entry in event.entries:
        assert len(entry.key) == KEY_BYTES
        parts += (entry.key, _BIT_BYTES[part_bit(entry.part, entry.tier)])
    return b"".join(parts)

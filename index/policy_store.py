"""Policy files in Redis: what was applied, and which places run it.

Covers versions and places as tools read and write them. Does not cover following them
(`pie.index.policy_follower`) or what a file may say (`pie.policies.loader`).

    <prefix>:{policies}:count     number of the version in force
    <prefix>:{policies}:versions  hash: number → version, as JSON; the latest 100, of 16 MiB together
    <prefix>:{policies}:heads     hash: number → of the version SHA-1, bytes, and what is told of it without its text as JSON, with spaces between
    <prefix>:{policies}:places    hash: place → Redis's time in seconds, a space, what it runs as JSON
    <prefix>:{policies}:refused   the latest edit of a watched file, as JSON, where it was not acceptable
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence
from typing import cast

import msgspec
import redis

from pie.index.client import make_client, translated
from pie.index.errors import IndexStrangeError, IndexUnavailableError, IndexUncertainError
from pie.index.settings import IndexSettings

_MOST_VERSIONS = 100
_MOST_BYTES = 16 << 20
"""Of all versions; the one in force stays whatever its size."""
_MOST_PROBLEMS = 20
_MOST_PROBLEM_CHARS = 2_000
_HEARD_OF_S = 10
"""A place that has said nothing for so long is not waited for."""
FORGOTTEN_S = 3600
LATEST_UNIX_S = 253_402_300_799
"""The end of the year 9999: no later time can be told."""
_MOST_DIGITS = 15
NOT_KNOWN = "whether the version is in force is not known: `pie policy history` says"

_MEND = """
-- What is of another type was written by somebody else, and what was there is lost.
local function mend(kind, ...)
  for _, key in ipairs({...}) do
    local is = redis.call('TYPE', key).ok
    if is ~= kind and is ~= 'none' then redis.call('UNLINK', key) end
  end
end
"""
_APPLY = (
    _MEND
    + """
mend('string', KEYS[1])
mend('hash', KEYS[2], KEYS[4])
local number = redis.call('INCR', KEYS[1])
redis.call('HSET', KEYS[2], number, ARGV[1])
redis.call('HSET', KEYS[4], number, ARGV[2])
redis.call('DEL', KEYS[3])
redis.call('HDEL', KEYS[2], number - tonumber(ARGV[3]))
local earlier, sizes, room = {}, {}, ARGV[4] - #ARGV[1]
local heads = redis.call('HGETALL', KEYS[4])
for at = 1, #heads, 2 do
  local one = #heads[at] <= 15 and tonumber(string.match(heads[at], '^%d+$'))
  if one and one < number then
    table.insert(earlier, one)
    sizes[one] = tonumber(string.match(heads[at + 1], '^%x+ (%d+) ')) or 0
  end
end
table.sort(earlier, function (a, b) return a > b end)
for _, one in ipairs(earlier) do
  room = room - sizes[one]
  if room < 0 or number - one >= tonumber(ARGV[3]) then
    redis.call('HDEL', KEYS[2], string.format('%d', one))
    redis.call('HDEL', KEYS[4], string.format('%d', one))
  end
end
return number
"""
)
_NOW = "return redis.call('TIME')[1]"
TELL = (
    _MEND
    + """
mend('hash', KEYS[1], KEYS[5], KEYS[6])
mend('string', KEYS[2], KEYS[3], KEYS[4])
redis.call('HSET', KEYS[1], ARGV[1], redis.call('TIME')[1] .. ' ' .. ARGV[2])
local number = redis.call('GET', KEYS[2]) or '0'
local head = redis.call('HGET', KEYS[5], number)
-- Who wrote the version may not have written one.
local digest = head and string.sub(head, 1, 40) or redis.sha1hex(redis.call('HGET', KEYS[6], number) or '')
return {number, redis.call('GET', KEYS[3]) or '', redis.call('GET', KEYS[4]) or '', digest}
"""
)
"""Say what a place runs; return the number of the version in force, the table of copies, the edit that was refused,
and the version's SHA-1."""
FORGET = """
local now, every = redis.call('TIME')[1], redis.call('HGETALL', KEYS[1])
for at = 1, #every, 2 do
  local told = tonumber(string.match(every[at + 1], '^%d+ '))
  if told and math.abs(now - told) > tonumber(ARGV[1]) then redis.call('HDEL', KEYS[1], every[at]) end
end
"""
"""Forget the places that were last heard of so many seconds ago."""
RESTORE = """
if (redis.call('GET', KEYS[1]) or '0') ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
redis.call('HSET', KEYS[3], ARGV[2], ARGV[4])
return 1
"""
"""Put a version in force again that Redis has lost, unless its number is another one by now."""


class PolicyVersion(msgspec.Struct, frozen=True):
    """One version; the number of the first is 1."""

    text: str | None
    """The file's content; None where every place takes the file that its configuration names."""
    applied_unix_s: float
    note: str = ""
    """Where it came from, such as a file's name or `rollback to 3`."""


class VersionHead(msgspec.Struct, frozen=True):
    """What is told of a version without its text."""

    applied_unix_s: float
    note: str
    text_bytes: int
    """0 where every place takes the file that its configuration names."""


class PlacePolicies(msgspec.Struct, frozen=True):
    """What one place or router runs."""

    version: int
    """0 where it runs what its configuration names and nothing was applied."""
    refused: int = 0
    """The version that it could not take; 0 where there is none."""
    reason: str = ""


class RefusedEdit(msgspec.Struct, frozen=True):
    """An edit of a file that is watched, which nobody typed a command for and reads an answer of."""

    file: str
    at_unix_s: float
    problems: tuple[str, ...]

    def __str__(self) -> str:
        others = len(self.problems) - 1
        more = f" (and {others} more)" if others else ""
        return f"the latest edit of {self.file} is refused: {self.problems[0]}{more}"


class PolicyKeys:
    """Names of the keys."""

    def __init__(self, prefix: str) -> None:
        base = f"{prefix}:{{policies}}"
        self.count = f"{base}:count"
        self.versions = f"{base}:versions"
        self.heads = f"{base}:heads"
        self.places = f"{base}:places"
        self.copies = f"{base}:copies"
        self.events = f"{base}:events"
        self.wanted = f"{base}:wanted"
        self.refused = f"{base}:refused"


class PolicyStore:
    """Versions in Redis, for tools. Blocks; not thread-safe.

    Every method raises `PageIndexError` where Redis does not do it.
    """

    def __init__(self, url: str, settings: IndexSettings | None = None) -> None:
        settings = settings or IndexSettings()
        self._client: redis.Redis = make_client(url, settings)
        self._keys = PolicyKeys(settings.key_prefix)

    def apply(self, text: str | None, note: str) -> int:
        """Make a text the version in force, and return its number.

        Where Redis goes away in between nobody knows whether it is, and the error says so.
        """
        version = PolicyVersion(text, round(time.time(), 3), note)
        raw = msgspec.json.encode(version)
        self.current()  # What is no number is told better here than by the script.
        try:
            with translated():
                number = self._client.eval(
                    _APPLY,
                    4,
                    self._keys.count,
                    self._keys.versions,
                    self._keys.refused,
                    self._keys.heads,
                    raw,
                    head_of(raw),
                    str(_MOST_VERSIONS),
                    str(_MOST_BYTES),
                )
        except IndexUnavailableError as error:
            if isinstance(error.__cause__, redis.ResponseError):
                raise  # Redis has answered that it is not.
            raise IndexUncertainError(f"{error}; {NOT_KNOWN}") from error
        return int(cast(int, number))

    def refuse(self, file: str, problems: Sequence[str]) -> None:
        """Say that the latest edit of a watched file is not acceptable, until one is or a text is applied."""
        # A problem may repeat what an error says, which may be of any length and characters.
        few = tuple(map(_kept, problems[:_MOST_PROBLEMS]))
        edit = RefusedEdit(_kept(file), round(time.time(), 3), few)
        with translated():
            self._client.set(self._keys.refused, msgspec.json.encode(edit))

    def accept(self) -> None:
        """Say that the watched file is as what is in force."""
        with translated():
            self._client.delete(self._keys.refused)

    def refused(self) -> RefusedEdit | None:
        """Return the latest edit of a watched file where it was not acceptable."""
        with translated():
            return read_refused(cast(bytes | None, self._client.get(self._keys.refused)))

    def current(self) -> int:
        """Return the number of the version in force; 0 where none was applied."""
        with translated():
            raw = cast(bytes | None, self._client.get(self._keys.count))
        return read_count(raw or b"0", self._keys)

    def version(self, number: int) -> PolicyVersion | None:
        """Return a version; None where there is none of that number that can be read, or no longer."""
        with translated():
            raw = cast(bytes | None, self._client.hget(self._keys.versions, str(number)))
        return None if raw is None else _version(raw)

    def versions(self) -> dict[int, VersionHead]:
        """Return what is told of the versions that are kept and can be read, by number: a text costs Redis a millisecond."""
        with translated():
            heads = cast(dict[bytes, bytes], self._client.hgetall(self._keys.heads))
        found = {
            int(number): head
            for number, raw in heads.items()
            if _is_number(number) and (head := _head(raw)) is not None
        }
        return dict(sorted(found.items()))

    def places(self) -> dict[str, PlacePolicies]:
        """Return what those run that were heard of lately, and forget those long gone."""
        with translated():
            # Of the server that has the table: those of a Cluster have a clock each.
            self._client.eval(FORGET, 1, self._keys.places, str(FORGOTTEN_S))
            now_s = int(cast(bytes, self._client.eval(_NOW, 1, self._keys.places)))
            every = cast(dict[bytes, bytes], self._client.hgetall(self._keys.places))
        found: dict[str, PlacePolicies] = {}
        for place, line in every.items():
            told_s, _, rest = line.partition(b" ")
            if not _is_number(told_s):
                continue
            # Of a clock that was set back since, whoever lives tells another one at once.
            age_s = abs(now_s - int(told_s))
            if age_s <= _HEARD_OF_S:
                # What somebody else wrote there is no place.
                with contextlib.suppress(ValueError, RecursionError):
                    found[place.decode()] = msgspec.json.decode(rest, type=PlacePolicies)
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Disconnect."""
        self._client.close()


def read_version(raw: bytes | str) -> PolicyVersion:
    """Return a version as it was written."""
    return msgspec.json.decode(raw, type=PolicyVersion)


def head_of(raw: bytes) -> bytes:
    """Return a version's head, as it is written beside it."""
    version = read_version(raw)
    size = len((version.text or "").encode("utf-8", "replace"))
    head = msgspec.json.encode(VersionHead(version.applied_unix_s, version.note, size))
    digest = hashlib.sha1(raw, usedforsecurity=False).hexdigest()
    return b"%s %d %s" % (digest.encode(), len(raw), head)


def read_refused(raw: bytes | str | None) -> RefusedEdit | None:
    """Return an edit that was refused as it was written; None where there is none that can be read."""
    try:
        edit = msgspec.json.decode(raw, type=RefusedEdit) if raw else None
    except (ValueError, RecursionError):
        return None
    return edit if edit is not None and edit.problems else None


def read_count(raw: bytes, keys: PolicyKeys) -> int:
    """Return the number of the version in force.

    Raises:
        IndexStrangeError: It is none.
    """
    if not _is_number(raw):
        said = raw[:40].decode(errors="backslashreplace")
        raise IndexStrangeError(
            f"{keys.count} in Redis is {said!r} and no version's number: somebody else wrote there; "
            f"set it to the largest number in {keys.versions}"
        )
    return int(raw)


def _version(raw: bytes | str) -> PolicyVersion | None:
    """Return a version that can be told."""
    try:
        version = read_version(raw)
    except (ValueError, RecursionError):
        return None
    return version if 0 <= version.applied_unix_s <= LATEST_UNIX_S else None


def _head(raw: bytes) -> VersionHead | None:
    """Return a version's head; None where there is none that can be told."""
    try:
        head = msgspec.json.decode(raw.split(b" ", 2)[-1], type=VersionHead)
    except (ValueError, RecursionError):
        return None
    return head if 0 <= head.applied_unix_s <= LATEST_UNIX_S else None


def _is_number(raw: bytes) -> bool:
    return raw.isdigit() and len(raw) <= _MOST_DIGITS


def _kept(text: str) -> str:
    """Return a text that UTF-8 can say."""
    return text[:_MOST_PROBLEM_CHARS].encode("utf-8", "backslashreplace").decode()

"""Numbers for keys: a row for each key and part, found by either.

Covers finding, adding and removing rows, one at a time or a million at once. Does not cover what is known of a
page (`pie.policies.page_rows`, `pie.pool.rest_rows`), which goes into columns of the same rows.

A pool node holds millions of small pages, and a `dict` from keys to ints takes 189 bytes a page with keys and parts. Here
keys lie one after another in one buffer, and rows are found by open addressing (linear probing, backward-shift
deletion; Knuth, TAOCP 3, 6.4): 33 bytes a row, and 8 to 16 for finding it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from pie.page.key import KEY_BYTES, PageKey

Row: TypeAlias = int
"""A number from 0; it is another page's once it was removed."""

NO_ROW: Row = -1

Keys: TypeAlias = npt.NDArray[np.uint8]
"""Keys, one in a line: `[keys, 32]`."""
Rows: TypeAlias = npt.NDArray[np.int32]
_Words: TypeAlias = npt.NDArray[np.uint64]

_SPREAD = 0x9E3779B97F4A7C15
"""Keeps the parts of a page apart (2^64 over the golden ratio)."""
_SHARDS = 1024
"""Tables that grow one at a time: each row takes 1.3 µs then, while others wait."""
_SHARD_BITS = 10
_EMPTY = array("i", [NO_ROW])
"""Every shard until it has a row; the first one makes it grow, so this one stays as it is."""
_NO_KEY = bytes(KEY_BYTES)
_FEW = 4096
"""Rows that are faster added one at a time."""


class KeyTable:
    """Rows of keys and parts. Not thread-safe."""

    def __init__(self) -> None:
        self.parts = array("B")
        self._keys = bytearray()
        self._odd: dict[Row, bytes] = {}
        """Keys of another length, which tests and simulations give: their BLAKE3 stands for them."""
        self._free = array("i")
        self._shards = [_EMPTY] * _SHARDS
        self._loads = array("i", [0]) * _SHARDS

    def __len__(self) -> int:
        return len(self.parts) - len(self._free)

    @property
    def capacity(self) -> int:
        """How many rows there are, free ones among them."""
        return len(self.parts)

    def key(self, row: Row) -> PageKey:
        """Return the key of a row."""
        if row in self._odd:
            return PageKey(self._odd[row])
        return PageKey(bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES]))

    def keys(self, rows: Rows) -> Keys:
        """Return the keys of rows."""
        return np.frombuffer(self._keys, np.uint8).reshape(-1, KEY_BYTES)[rows]

    def find(self, key: bytes, part: int) -> Row:
        """Return the row of a key, or `NO_ROW`."""
        if len(key) != KEY_BYTES:
            key = blake3(key).digest()
        mixed = hash(key) ^ (part * _SPREAD)
        slots, keys = self._shards[mixed & (_SHARDS - 1)], self._keys
        mask = len(slots) - 1
        at = (mixed >> _SHARD_BITS) & mask
        while (row := slots[at]) >= 0:
            start = row * KEY_BYTES
            if keys[start : start + KEY_BYTES] == key and self.parts[row] == part:
                return row
            at = (at + 1) & mask
        return NO_ROW

    def find_or_add(self, key: bytes, part: int) -> Row:
        """Return the row of a key, a new one where it has none."""
        row = self.find(key, part)
        if row < 0 and len(key) != KEY_BYTES:
            row = self._add(blake3(key).digest(), part)
            self._odd[row] = key
        return row if row >= 0 else self._add(key, part)

    def find_or_add_all(self, keys: Keys, parts: npt.NDArray[np.uint8]) -> Rows:
        """Return the rows of many keys, some of which may be the same."""
        mixed = _mixed_all(keys, parts)
        if len(keys) < _FEW:
            pairs = zip(keys, parts.tolist(), strict=True)
            return np.fromiter((self.find_or_add(k.tobytes(), p) for k, p in pairs), np.int32)
        words = np.ascontiguousarray(keys).view(np.uint64)
        found = self._find_all(mixed, words, parts)
        new = np.flatnonzero(found < 0)
        if len(new):
            found[new] = self._add_all(mixed[new], words[new], parts[new])
        return found

    def remove(self, row: Row) -> None:
        """Take a row away."""
        mixed = self._mixed(row)
        number = mixed & (_SHARDS - 1)
        slots = self._shards[number]
        self._loads[number] -= 1
        mask = len(slots) - 1
        at = (mixed >> _SHARD_BITS) & mask
        while slots[at] != row:
            at = (at + 1) & mask
        hole = at
        while (after := slots[at := (at + 1) & mask]) >= 0:
            # A row moves back into the hole unless that lies before the place it belongs to.
            home = (self._mixed(after) >> _SHARD_BITS) & mask
            if (at - home) & mask >= (at - hole) & mask:
                slots[hole] = after
                hole = at
        slots[hole] = NO_ROW
        self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = _NO_KEY
        self._odd.pop(row, None)
        self._free.append(row)

    def check(self) -> None:
        """Assert that the table agrees with itself; slow, for tests."""
        slots = [row for shard in self._shards for row in shard if row >= 0]
        assert len(slots) == len(set(slots)) == sum(self._loads) == len(self)
        assert not set(slots) & set(self._free)
        assert all(self.find(self.key(row), self.parts[row]) == row for row in slots)

    def _add(self, key: bytes, part: int) -> Row:
        if self._free:
            row = self._free.pop()
            self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES] = key
            self.parts[row] = part
        else:
            row = len(self.parts)
            self._keys += key
            self.parts.append(part)
        mixed = hash(key) ^ (part * _SPREAD)
        number = mixed & (_SHARDS - 1)
        self._loads[number] += 1
        slots = self._shards[number]
        if 2 * self._loads[number] > len(slots):
            slots = self._grow(number)
        _put(slots, mixed, row)
        return row

    def _find_all(self, mixed: _Words, words: _Words, parts: npt.NDArray[np.uint8]) -> Rows:
        """Return the rows of many keys, and `NO_ROW` where they have none."""
        found = np.full(len(mixed), NO_ROW, np.int32)
        slots = _Slots(self._shards)
        at, asked = slots.homes(mixed), np.arange(len(mixed))
        while len(asked):
            rows = slots.rows[at]
            full = rows >= 0
            asked, at, rows = asked[full], at[full], rows[full]
            same = self._is_at(rows, words[asked], parts[asked])
            found[asked[same]] = rows[same]
            asked, at = asked[~same], slots.after(at[~same])
        return found

    def _add_all(self, mixed: _Words, words: _Words, parts: npt.NDArray[np.uint8]) -> Rows:
        """Give rows to many keys that have none, some of which may be the same."""
        self._make_room(mixed)
        found = np.empty(len(mixed), np.int32)
        slots = _Slots(self._shards)
        at, asked = slots.homes(mixed), np.arange(len(mixed))
        while len(asked):
            winners = slots.claim(at)
            rows = self._new_rows(words[asked[winners]], parts[asked[winners]])
            slots.rows[at[winners]] = rows
            rows = slots.rows[at]
            same = self._is_at(rows, words[asked], parts[asked])
            found[asked[same]] = rows[same]
            asked, at = asked[~same], slots.after(at[~same])
        slots.write(self._shards)
        added = np.unique(found, return_index=True)[1]
        self._count_loads(mixed[added])
        return found

    def _is_at(
        self, rows: Rows, words: _Words, parts: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = (self._words()[rows] == words).all(axis=1)
        same &= np.frombuffer(self.parts, np.uint8)[rows] == parts
        return same

    def _make_room(self, mixed: _Words) -> None:
        """Make shards as large as they must be for so many more keys."""
        more = np.bincount(_shards_of(mixed), minlength=_SHARDS).tolist()
        grown: list[array[int]] = []
        for number, (load, added) in enumerate(zip(self._loads, more, strict=True)):
            before = self._shards[number]
            size = len(before)
            while 2 * (load + added) > size:
                size *= 2
            if size > len(before):
                grown.append(before)
                self._shards[number] = array("i", [NO_ROW]) * size
        if not grown:
            return
        rows = np.concatenate([np.frombuffer(shard, np.int32) for shard in grown])
        rows = rows[rows >= 0]
        mixed = _mixed_all(self.keys(rows), np.frombuffer(self.parts, np.uint8)[rows])
        slots = _Slots(self._shards)
        at = slots.homes(mixed)
        while len(rows):
            winners = slots.claim(at)
            slots.rows[at[winners]] = rows[winners]
            others = slots.rows[at] != rows
            rows, at = rows[others], slots.after(at[others])
        slots.write(self._shards)

    def _count_loads(self, mixed: _Words) -> None:
        loads = np.frombuffer(self._loads, np.int32)
        loads += np.bincount(_shards_of(mixed), minlength=_SHARDS).astype(np.int32)

    def _new_rows(self, words: _Words, parts: npt.NDArray[np.uint8]) -> Rows:
        """Give new rows to keys, the free ones first."""
        again = min(len(self._free), len(words))
        rows = np.arange(self.capacity - again, self.capacity - again + len(words), dtype=np.int32)
        if again:
            rows[:again] = self._free[-again:]
            del self._free[-again:]
        self._keys += words[again:].tobytes()
        self.parts.frombytes(parts[again:].tobytes())
        if again:
            self._words()[rows[:again]] = words[:again]
            np.frombuffer(self.parts, np.uint8)[rows[:again]] = parts[:again]
        return rows

    def _words(self) -> _Words:
        return np.frombuffer(self._keys, np.uint64).reshape(-1, KEY_BYTES // 8)

    def _mixed(self, row: Row) -> int:
        key = bytes(self._keys[row * KEY_BYTES : (row + 1) * KEY_BYTES])
        return hash(key) ^ (self.parts[row] * _SPREAD)

    def _grow(self, number: int) -> array[int]:
        """Make a shard twice as large."""
        before = self._shards[number]
        slots = self._shards[number] = array("i", [NO_ROW]) * (2 * len(before))
        for row in before:
            if row >= 0:
                _put(slots, self._mixed(row), row)
        return slots


class _Slots:
    """The slots of all shards one after another, as long as many rows are looked for at once."""

    def __init__(self, shards: Sequence[array[int]]) -> None:
        self.rows = np.concatenate([np.frombuffer(shard, np.int32) for shard in shards])
        sizes = np.array([len(shard) for shard in shards])
        self._masks = sizes - 1
        self._starts = np.cumsum(sizes) - sizes
        self._shard_of = np.repeat(np.arange(len(shards), dtype=np.int16), sizes)

    def homes(self, mixed: _Words) -> npt.NDArray[np.intp]:
        """Return where the search for each begins."""
        shards = _shards_of(mixed)
        inner = (mixed >> np.uint64(_SHARD_BITS)).view(np.int64) & self._masks[shards]
        homes: npt.NDArray[np.intp] = self._starts[shards] + inner
        return homes

    def after(self, at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return where the search goes on."""
        shards = self._shard_of[at]
        starts = self._starts[shards]
        after: npt.NDArray[np.intp] = starts + ((at - starts + 1) & self._masks[shards])
        return after

    def claim(self, at: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return which of those that meet at empty slots have them: the last of each to write."""
        empty = np.flatnonzero(self.rows[at] < 0)
        marks = -2 - empty.astype(np.int32)
        self.rows[at[empty]] = marks
        winners: npt.NDArray[np.intp] = empty[self.rows[at[empty]] == marks]
        return winners

    def write(self, shards: Sequence[array[int]]) -> None:
        """Let the shards say what is here."""
        for shard, start in zip(shards, self._starts.tolist(), strict=True):
            np.frombuffer(shard, np.int32)[:] = self.rows[start : start + len(shard)]


def _shards_of(mixed: _Words) -> npt.NDArray[np.int64]:
    return (mixed & np.uint64(_SHARDS - 1)).view(np.int64)


def _put(slots: array[int], mixed: int, row: Row) -> None:
    mask = len(slots) - 1
    at = (mixed >> _SHARD_BITS) & mask
    while slots[at] >= 0:
        at = (at + 1) & mask
    slots[at] = row


def _mixed_all(keys: Keys, parts: npt.NDArray[np.uint8]) -> _Words:
    """Return what `KeyTable` finds keys by, as `hash` of one key says it."""
    each = np.ascontiguousarray(keys).view(f"V{KEY_BYTES}").ravel().tolist()
    hashes = np.fromiter(map(hash, each), np.int64, len(keys)).view(np.uint64)
    return hashes ^ (parts.astype(np.uint64) * np.uint64(_SPREAD))


def as_keys(keys: Sequence[bytes]) -> Keys:
    """Return keys of 32 bytes as one array."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)

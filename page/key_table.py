"""Numbers for keys: a row for each key and part, found by either.

Covers finding, adding and removing rows, one at a time or a million at once. Does not cover what is known of a
page (`pie.policies.page_rows`, `pie.pool.rest_rows`), which goes into columns of the same rows.

A pool node holds millions of small pages, and a `dict` from keys to ints takes 170 bytes a page with the keys. Here
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

_SPREAD = 0x9E3779B97F4A7C15
"""Keeps the parts of a page apart (2^64 over the golden ratio)."""
_SHARDS = 1024
"""Tables that grow one at a time: one of a million rows would hold a step for 0.4 s."""
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
        shards = mixed & (_SHARDS - 1)
        order = np.argsort(shards, kind="stable")
        bounds = np.searchsorted(shards[order], np.arange(_SHARDS + 1))
        words = np.ascontiguousarray(keys).view(np.uint64)
        found = np.empty(len(keys), np.int32)
        for shard in range(_SHARDS):
            some = order[bounds[shard] : bounds[shard + 1]]
            if len(some):
                self._add_to(shard, some, words, parts, mixed, found)
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

    def _add_to(
        self,
        number: int,
        some: npt.NDArray[np.intp],
        words: npt.NDArray[np.uint64],
        parts: npt.NDArray[np.uint8],
        mixed: npt.NDArray[np.uint64],
        found: Rows,
    ) -> None:
        """Find or add those of many keys, by place in `words`, that belong in one shard."""
        while 2 * (self._loads[number] + len(some)) > len(self._shards[number]):
            self._grow(number)
        slots = np.frombuffer(self._shards[number], np.int32)
        mask = len(slots) - 1
        at = ((mixed[some] >> np.uint64(_SHARD_BITS)) & np.uint64(mask)).astype(np.intp)
        while len(some):
            # Of those that meet at an empty slot the one that wrote last has it.
            empty = np.flatnonzero(slots[at] < 0)
            if len(empty):
                claimed = at[empty]
                slots[claimed] = -2 - empty.astype(np.int32)
                winners = empty[slots[claimed] == -2 - empty]
                slots[at[winners]] = self._new_rows(words[some[winners]], parts[some[winners]])
                self._loads[number] += len(winners)
            rows = slots[at]
            same = (self._words()[rows] == words[some]).all(axis=1)
            same &= np.frombuffer(self.parts, np.uint8)[rows] == parts[some]
            found[some[same]] = rows[same]
            some, at = some[~same], (at[~same] + 1) & mask

    def _new_rows(self, words: npt.NDArray[np.uint64], parts: npt.NDArray[np.uint8]) -> Rows:
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

    def _words(self) -> npt.NDArray[np.uint64]:
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


def _put(slots: array[int], mixed: int, row: Row) -> None:
    mask = len(slots) - 1
    at = (mixed >> _SHARD_BITS) & mask
    while slots[at] >= 0:
        at = (at + 1) & mask
    slots[at] = row


def _mixed_all(keys: Keys, parts: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """Return what `KeyTable` finds keys by, as `hash` of one key says it."""
    data = np.ascontiguousarray(keys).tobytes()
    each = (data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES))
    hashes = np.fromiter(map(hash, each), np.int64, len(keys)).view(np.uint64)
    return hashes ^ (parts.astype(np.uint64) * np.uint64(_SPREAD))


def as_keys(keys: Sequence[bytes]) -> Keys:
    """Return keys of 32 bytes as one array."""
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)

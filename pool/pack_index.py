"""The list of the pages in a pack, in a file beside it.

Covers its records. Does not cover the pack (`pie.pool.packs`).

The list is only ever appended to: a page came, a page left. A record says its length and its
checksum, so that a torn one is known for what it is, and begins with a mark, so that those after
it are found. With a cluster secret the checksum is keyed with it.

What comes is a few fields at fixed places and then, in msgpack, what pages of one model have in common, so that a
million records are read as columns. What does not fit there, and what leaves, is msgpack as a whole, whose first
byte is never that of the other form.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from pie.page.events import Part
from pie.page.header import CHECKSUM_BYTES, PageHeader, checksum
from pie.page.key import KEY_BYTES, PageKey, RootKey

_MARK = b"PIE\x01"
_START = struct.Struct(f"<4sI{CHECKSUM_BYTES}s")


class Came(msgspec.Struct, frozen=True, tag="came", array_like=True):
    """A page lies in the pack from here on."""

    offset: int
    length: int
    stored_ns: int
    """Wall-clock time: pages that a later start finds are ordered by it, and nothing else is."""
    header: PageHeader
    key_id: bytes | None = None
    """Which key the page is encrypted with; None where it is not."""


class Left(msgspec.Struct, frozen=True, tag="left", array_like=True):
    """The page at an offset has left."""

    offset: int
    key: PageKey
    pack: str = ""
    """Which pack that is, where the list is not of one pack alone."""


Record = Came | Left


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """What the headers of many pages have in common."""

    model_root: RootKey
    dtype: str
    layout_id: str
    page_tokens: int
    shard: int
    codec: str
    tenant_tag: str
    session_tag: str
    version: int
    key_id: bytes | None = None

    def header(
        self,
        *,
        key: PageKey,
        parent: bytes,
        index: int,
        part: Part,
        raw_bytes: int,
        checksum: bytes,
        group: bytes,
    ) -> PageHeader:
        """Return the header of one of those pages."""
        return PageHeader(
            key=key,
            parent=parent,
            index=index,
            part=part,
            model_root=self.model_root,
            dtype=self.dtype,
            layout_id=self.layout_id,
            page_tokens=self.page_tokens,
            raw_bytes=raw_bytes,
            checksum=checksum,
            shard=self.shard,
            codec=self.codec,
            tenant_tag=self.tenant_tag,
            session_tag=self.session_tag,
            version=self.version,
            group=group,
        )


_COLUMNS = np.dtype(
    [
        ("form", "u1"),
        ("part", "u1"),
        ("has_group", "u1"),
        ("offset", "<u4"),
        ("length", "<u4"),
        ("index", "<i4"),
        ("raw_bytes", "<u4"),
        ("stored_ns", "<i8"),
        ("key", "u1", KEY_BYTES),
        ("parent", "u1", KEY_BYTES),
        ("group", "u1", KEY_BYTES),
        ("checksum", "u1", CHECKSUM_BYTES),
    ]
)
_FIXED = struct.Struct(f"<BBBIIiIq{KEY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{CHECKSUM_BYTES}s")
_FORM = 1
_NAMED = _START.size - CHECKSUM_BYTES
"""Bytes of a record before its checksum."""
_RUN = 16
"""Records that are faster read together than one at a time."""


@dataclass(slots=True)
class CameColumns:
    """Pages that lie in packs, a line each."""

    records: npt.NDArray[np.void]
    """Fields as `_COLUMNS` names them."""
    shared: list[Shared]
    shared_of: npt.NDArray[np.int32]
    """Which of `shared` is each page's."""
    pack_of: npt.NDArray[np.int32]
    """Which of the packs that were read each lies in."""

    def __len__(self) -> int:
        return len(self.records)

    def take(self, lines: npt.NDArray[np.intp]) -> CameColumns:
        """Return some lines."""
        return CameColumns(
            self.records[lines], self.shared, self.shared_of[lines], self.pack_of[lines]
        )

    def came(self, lines: Iterable[int]) -> Iterator[Came]:
        """Return lines as records."""
        for line in lines:
            yield _came(self.records[line].tobytes(), self.shared[self.shared_of[line]])


class PackList(NamedTuple):
    """What a list says."""

    columns: CameColumns
    """Pages that have come and not left."""
    others: list[Came]
    """The same of those that do not fit in columns."""
    is_whole: bool
    """Whether nothing else is in the list."""

    def within(self, size: int) -> PackList:
        """Return the same without pages that end behind so many bytes."""
        ends = self._ends()
        others = [came for came in self.others if came.offset + came.length <= size]
        if (ends <= size).all() and len(others) == len(self.others):
            return self
        return PackList(self.columns.take(np.flatnonzero(ends <= size)), others, is_whole=False)

    @property
    def end(self) -> int:
        """Where the last page ends."""
        return max(
            int(self._ends().max(initial=0)),
            max((came.offset + came.length for came in self.others), default=0),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of all page files."""
        listed = int(self.columns.records["length"].sum(dtype=np.int64))
        return listed + sum(came.length for came in self.others)

    def _ends(self) -> npt.NDArray[np.int64]:
        records = self.columns.records
        ends: npt.NDArray[np.int64] = records["offset"].astype(np.int64) + records["length"]
        return ends


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Came | Left)
_shared_decoder = msgspec.msgpack.Decoder(Shared)

LEFT_BYTES = 80
"""Of a `Left` at most, mark and checksum included."""


def fits(header: PageHeader) -> bool:
    """Say whether a page fits in columns: all that a cluster's own nodes store do."""
    return (
        len(header.key) == len(header.parent) == KEY_BYTES
        and len(header.group) in {0, KEY_BYTES}
        and len(header.checksum) == CHECKSUM_BYTES
        and 0 <= header.index < 2**31
        and 0 <= header.raw_bytes < 2**32
    )


def shared_of(header: PageHeader, key_id: bytes | None = None) -> Shared:
    """Return what a page's header has in common with others."""
    return Shared(
        model_root=header.model_root,
        dtype=header.dtype,
        layout_id=header.layout_id,
        page_tokens=header.page_tokens,
        shard=header.shard,
        codec=header.codec,
        tenant_tag=header.tenant_tag,
        session_tag=header.session_tag,
        version=header.version,
        key_id=key_id,
    )


def encode_record(record: Record, secret: bytes | None = None) -> bytes:
    """Return a record as it is appended."""
    if isinstance(record, Came) and fits(record.header) and record.offset + record.length < 2**32:
        header = record.header
        body = _FIXED.pack(
            *(_FORM, header.part, bool(header.group), record.offset, record.length),
            *(header.index, header.raw_bytes, record.stored_ns),
            *(header.key, header.parent, header.group, header.checksum),
        ) + _encoder.encode(shared_of(header, record.key_id))
    else:
        body = _encoder.encode(record)
    return _START.pack(_MARK, len(body), checksum(body, secret)) + body


def decode_records(data: bytes, secret: bytes | None = None) -> tuple[list[Record], bool]:
    """Return the whole records of a list, and whether nothing else is in it."""
    bodies, whole = _bodies(data, secret)
    records: list[Record] = []
    for body in bodies:
        try:
            records.append(_record(body))
        except (msgspec.MsgspecError, ValueError):
            whole = False
    return records, whole


def decode_list(data: bytes, secret: bytes | None = None) -> PackList:
    """Return the pages that a list says are there, the last one where two lie at one offset."""
    runs, end = _runs(data, secret)
    bodies, whole = _bodies(data[end:], secret)
    tails = [run[0, _FIXED.size :].tobytes() for run in runs]
    numbers = {tail: number for number, tail in enumerate(dict.fromkeys(tails))}
    listed = [np.ascontiguousarray(run[:, : _FIXED.size]).view(_COLUMNS)[:, 0] for run in runs]
    shared_of = [np.full(len(run), numbers[tail]) for run, tail in zip(runs, tails, strict=True)]
    in_runs = sum(map(len, runs))
    orders = list(range(in_runs))
    fixed: list[bytes] = []
    others_of: list[int] = []
    others: dict[int, tuple[int, Came]] = {}
    left: dict[int, int] = {}
    for order, body in enumerate(bodies, in_runs):
        if body[0] == _FORM and len(body) > _FIXED.size:
            fixed.append(body[: _FIXED.size])
            orders.append(order)
            others_of.append(numbers.setdefault(body[_FIXED.size :], len(numbers)))
            continue
        try:
            record = _record(body)
        except (msgspec.MsgspecError, ValueError):
            whole = False
            continue
        if isinstance(record, Left):
            left[record.offset] = order
        else:
            others[record.offset] = (order, record)
    try:
        shared = [_shared_decoder.decode(tail) for tail in numbers]
    except msgspec.MsgspecError:
        return PackList(_no_columns(), [], is_whole=False)
    records = np.concatenate([*listed, np.frombuffer(b"".join(fixed), _COLUMNS)])
    columns = CameColumns(
        records,
        shared,
        np.concatenate([*shared_of, others_of]).astype(np.int32),
        np.zeros(len(records), np.int32),
    )
    stays = [came for order, came in others.values() if left.get(came.offset, -1) < order]
    return PackList(columns.take(_staying(columns, orders, left)), stays, whole)


def _runs(data: bytes, secret: bytes | None) -> tuple[list[npt.NDArray[np.uint8]], int]:
    """Return the bodies of records at the beginning of a list that differ in columns alone, and where they end.

    That is what a list looks like of a node that serves one model to one tenant; `_bodies` reads others.
    """
    runs: list[npt.NDArray[np.uint8]] = []
    at, size = 0, _START.size
    tail_at = size + _FIXED.size
    while len(data) - at >= size:
        mark, length, _ = _START.unpack_from(data, at)
        step = size + length
        count = (len(data) - at) // step
        if mark != _MARK or length <= _FIXED.size or count < _RUN:
            break
        lines = np.frombuffer(data, np.uint8, count * step, at).reshape(count, step)
        first = lines[0]
        same = (lines[:, :_NAMED] == first[:_NAMED]).all(axis=1)
        same &= (lines[:, tail_at:] == first[tail_at:]).all(axis=1)
        same &= lines[:, size] == _FORM
        count = _leading(same)
        found = [
            checksum(data[end - length : end], secret)
            for end in range(at + step, at + count * step + 1, step)
        ]
        checked = np.frombuffer(b"".join(found), np.uint8).reshape(-1, CHECKSUM_BYTES)
        count = _leading((checked == lines[:count, _NAMED:size]).all(axis=1))
        if count < _RUN:
            break
        runs.append(lines[:count, size:])
        at += count * step
    return runs, at


def _leading(wanted: npt.NDArray[np.bool_]) -> int:
    """Return how many are true before the first that is not."""
    return len(wanted) if wanted.all() else int(wanted.argmin())


def _staying(columns: CameColumns, orders: list[int], left: dict[int, int]) -> npt.NDArray[np.intp]:
    """Return the lines of pages that are still there, in their order."""
    offsets = columns.records["offset"]
    last = len(offsets) - 1 - np.unique(offsets[::-1], return_index=True)[1]
    last.sort()
    if not left:
        return last
    asked = np.isin(offsets[last], np.fromiter(left, np.uint32, len(left)))
    gone = [line for line in last[asked].tolist() if left[int(offsets[line])] > orders[line]]
    return np.setdiff1d(last, np.array(gone, np.intp), assume_unique=True)


def _no_columns() -> CameColumns:
    none = np.empty(0, np.int32)
    return CameColumns(np.empty(0, _COLUMNS), [], none, none)


def join(each: Sequence[CameColumns]) -> CameColumns:
    """Return several columns as one, whose packs are numbered in that order."""
    numbers: dict[Shared, int] = {}
    shared_of = []
    for one in each:
        mine = np.array([numbers.setdefault(s, len(numbers)) for s in one.shared], np.int32)
        shared_of.append(mine[one.shared_of] if len(mine) else one.shared_of)
    sizes = [len(one) for one in each]
    return CameColumns(
        np.concatenate([one.records for one in each]),
        list(numbers),
        np.concatenate(shared_of),
        np.repeat(np.arange(len(each), dtype=np.int32), sizes),
    )


def _bodies(data: bytes, secret: bytes | None) -> tuple[list[bytes], bool]:
    """Return the bodies of records whose checksum is right, and whether nothing else is there."""
    bodies: list[bytes] = []
    whole = True
    at, size = 0, _START.size
    while at < len(data):
        if len(data) - at >= size:
            mark, length, found = _START.unpack_from(data, at)
            end = at + size + length
            body = data[at + size : end]
            whole_body = mark == _MARK and 0 < length == len(body)
            if whole_body and found == checksum(body, secret):
                bodies.append(body)
                at = end
                continue
        whole = False
        at = data.find(_MARK, at + 1)
        if at < 0:
            break
    return bodies, whole


def _record(body: bytes) -> Record:
    if body[0] == _FORM:
        return _came(body, _shared_decoder.decode(body[_FIXED.size :]))
    return _decoder.decode(body)


def _came(fixed: bytes, shared: Shared) -> Came:
    (_, part, has_group, offset, length, index, raw_bytes, stored_ns, key, parent, group, found) = (
        _FIXED.unpack(fixed[: _FIXED.size])
    )
    header = shared.header(
        key=PageKey(key),
        parent=parent,
        index=index,
        part=Part(part),
        raw_bytes=raw_bytes,
        checksum=found,
        group=group if has_group else b"",
    )
    return Came(offset, length, stored_ns, header, shared.key_id)

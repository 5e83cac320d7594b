"""The list of the pages in a pack, in a file beside it.

Covers its records. Does not cover the pack (`pie.pool.packs`).

The list is only ever appended to: a page came, a page left. A record says its length and its
checksum, so that a torn one is known for what it is, and begins with a mark, so that those after
it are found. With a cluster secret the checksum is keyed with it.
"""

from __future__ import annotations

import hmac
import struct

import msgspec

from pie.page.format import CHECKSUM_BYTES, PageHeader, checksum
from pie.page.key import PageKey

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


Record = Came | Left

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Came | Left)

LEFT_BYTES = 80
"""Of a `Left` at most, mark and checksum included."""


def encode_record(record: Record, secret: bytes | None = None) -> bytes:
    """Return a record as it is appended."""
    body = _encoder.encode(record)
    return _START.pack(_MARK, len(body), checksum(body, secret)) + body


def decode_records(data: bytes, secret: bytes | None = None) -> tuple[list[Record], bool]:
    """Return the whole records of a list, and whether nothing else is in it."""
    records: list[Record] = []
    whole = True
    at = 0
    while at < len(data):
        record, end = _record_at(data, at, secret)
        if record is not None:
            records.append(record)
            at = end
            continue
        whole = False
        at = data.find(_MARK, at + 1)
        if at < 0:
            break
    return records, whole


def _record_at(data: bytes, at: int, secret: bytes | None) -> tuple[Record | None, int]:
    if len(data) - at < _START.size:
        return None, at
    mark, length, found = _START.unpack_from(data, at)
    start = at + _START.size
    body = data[start : start + length]
    if mark != _MARK or len(body) != length:
        return None, at
    if not hmac.compare_digest(found, checksum(body, secret)):
        return None, at
    try:
        return _decoder.decode(body), start + length
    except msgspec.MsgspecError:
        return None, at

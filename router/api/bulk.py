"""How much a body may hold, whatever it says.

Covers counting what a JSON text holds before anything of it is built: 16 MB have room for five
million objects, which take seconds of the event loop and gigabytes. Does not cover the length of
each list, which its schema bounds (`pie.router.api.body`).
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel

from pie.router.api.extras import raw_fields
from pie.router.errors import ApiError, invalid

MAX_VALUES = 524_288
"""Reading so many token ids takes 50 ms."""
MAX_OBJECTS = 32_768
"""Reading so many messages takes 80 ms."""
MAX_STRINGS = 262_144


class _Bulk(NamedTuple):
    """What a JSON text holds, each a little too much at most and never too little."""

    objects: int
    values: int
    strings: int


_MOST = _Bulk(MAX_OBJECTS, MAX_VALUES, MAX_STRINGS)


def check_bulk(kind: type[BaseModel], data: bytes | bytearray) -> None:
    """Refuse a body that holds too much, in some milliseconds for each million bytes.

    Raises:
        ApiError: 400 that names the field and the limit.
    """
    if (refused := _refused(data, None)) is None:
        return
    # Only now is it worth looking where.
    for name, raw in raw_fields(kind, data).items():
        if (in_field := _refused(raw, name)) is not None:
            raise in_field
    raise refused


def _refused(data: bytes | bytearray, param: str | None) -> ApiError | None:
    """Return the error for a text that holds too much."""
    for what, held, most in zip(_Bulk._fields, _bulk(data), _MOST, strict=True):
        if held > most:
            where = f"{param}: " if param else ""
            return invalid(f"{where}at most {most:,} {what} fit into a body", param, "too_large")
    return None


def _bulk(data: bytes | bytearray) -> _Bulk:
    """Return what a JSON text holds: what stands outside its strings is counted."""
    if len(data) <= MAX_OBJECTS:
        return _Bulk(0, 0, 0)
    plain = bytes(data).replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings > MAX_STRINGS:
        return _Bulk(0, 0, strings)
    outside = b"".join(plain.split(b'"')[::2])
    objects = outside.count(b"{")
    return _Bulk(objects, objects + outside.count(b"[") + outside.count(b","), strings)

"""What a body may hold, whatever it says.

Covers counting what a JSON text holds before anything of it is built: 16 MB have room for five
million objects, which take seconds of the event loop and gigabytes; and numbers that are no JSON. Does not cover the length of
each list, which its schema bounds (`pie.router.api.body`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from pie.router.api.extras import raw_fields
from pie.router.errors import ApiError, invalid

MAX_VALUES = 524_288
"""So many token ids take 45 ms to read, a few at a time."""
MAX_OBJECTS = 16_384
"""Reading so many parts of messages takes 26 ms, in which no other thread of Python runs."""
MAX_STRINGS = 262_144
_SLICE_BYTES = 262_144
"""Looked at in one go, a millisecond, so that a thread that counts lets others have their turn."""
_NO_NUMBERS = (b"NaN", b"Infinity")


def check_bulk(kind: type[BaseModel], data: bytes | bytearray) -> None:
    """Refuse a body that holds too much, or numbers that are none, in some milliseconds for each million bytes.

    Raises:
        ApiError: 400 that names the field and the limit.
    """
    if len(data) <= MAX_OBJECTS:
        check_numbers(data)
        return
    found = _scanned(data)
    if (refused := _refused(found, None)) is not None:
        # Only now is it worth looking where.
        for name, raw in raw_fields(kind, data).items():
            if (in_field := _refused(_scanned(raw), name)) is not None:
                raise in_field
        raise refused
    _refuse_number(found.number)


def check_numbers(data: bytes | bytearray) -> None:
    """Refuse `NaN` and `Infinity`, which are no JSON and which the parser takes all the same.

    Raises:
        ApiError: 400.
    """
    if len(data) > MAX_OBJECTS or any(name in data for name in _NO_NUMBERS):
        _refuse_number(_scanned(data).number)


@dataclass(slots=True)
class _Scan:
    """What stands in a JSON text, outside its strings but for their number."""

    strings: int = 0
    objects: int = 0
    values: int = 0
    """Each stands after a comma or a bracket."""
    number: bytes | None = None
    """One that is no number of JSON."""

    @property
    def broken(self) -> str | None:
        """The limit that it breaks."""
        if self.strings > MAX_STRINGS:
            return f"{MAX_STRINGS:,} strings"
        if self.objects > MAX_OBJECTS:
            return f"{MAX_OBJECTS:,} objects"
        return f"{MAX_VALUES:,} values" if self.values > MAX_VALUES else None


def _scanned(data: bytes | bytearray) -> _Scan:
    """Return what stands in a JSON text."""
    found, quotes, tail = _Scan(), 0, b""
    for plain in _slices(data):
        parts = plain.split(b'"')
        # Each quotation mark begins or ends a string, and this slice may begin within one.
        outside = b'"'.join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        objects = outside.count(b"{")
        found.objects += objects
        found.values += objects + outside.count(b"[") + outside.count(b",")
        outside = tail + outside
        found.number = found.number or next((n for n in _NO_NUMBERS if n in outside), None)
        # What follows a string does not go on with what stood before it.
        tail = b"" if quotes % 2 else outside[-max(map(len, _NO_NUMBERS)) + 1 :]
    found.strings = quotes // 2
    return found


def _slices(data: bytes | bytearray) -> Iterator[bytes]:
    """Yield a JSON text piece by piece, without escaped quotation marks and backslashes."""
    at = 0
    while at < len(data):
        piece = bytes(data[at : at + _SLICE_BYTES])
        if at + len(piece) < len(data) and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece = piece[:-1]  # or an escape were cut apart
        at += len(piece)
        yield piece.replace(b"\\\\", b"").replace(b'\\"', b"")


def _refuse_number(name: bytes | None) -> None:
    if name is not None:
        text = f"The body is not JSON: {name.decode()} is no number of it"
        raise invalid(text, None, "invalid_json")


def _refused(found: _Scan, param: str | None) -> ApiError | None:
    """Return the error for a text that holds too much."""
    if (broken := found.broken) is None:
        return None
    where = f"{param}: " if param else ""
    return invalid(f"{where}at most {broken} fit into a body", param, "too_large")

"""What a body may hold, whatever it says.

Covers counting what a JSON text holds before anything of it is built: 16 MB have room for five
million objects, which take seconds of the event loop and gigabytes; and numbers that are no JSON. Does not cover the length of
each list, which its schema bounds (`pie.router.api.body`).
"""

from __future__ import annotations

from pydantic import BaseModel

from pie.router.api.extras import raw_fields
from pie.router.errors import ApiError, invalid

MAX_VALUES = 524_288
"""Reading so many token ids takes 50 to 70 ms, in which no other thread of Python runs."""
MAX_OBJECTS = 16_384
"""Reading so many parts of messages takes 50 ms."""
MAX_STRINGS = 262_144


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


def check_numbers(data: bytes | bytearray) -> None:
    """Refuse `NaN` and `Infinity`, which are no JSON and which the parser takes all the same.

    Raises:
        ApiError: 400.
    """
    for name in (b"NaN", b"Infinity"):
        if name in data and name in _outside_strings(_unescaped(data)):
            raise invalid(
                f"The body is not JSON: {name.decode()} is no number of it", None, "invalid_json"
            )


def _unescaped(data: bytes | bytearray) -> bytes:
    """Return a JSON text in which each quotation mark begins or ends a string."""
    return bytes(data).replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_strings(plain: bytes) -> bytes:
    """Return what stands outside the strings of such a text."""
    return b'"'.join(plain.split(b'"')[::2])


def _refused(data: bytes | bytearray, param: str | None) -> ApiError | None:
    """Return the error for a text that holds too much."""
    broken = _broken_limit(data)
    if broken is None:
        return None
    where = f"{param}: " if param else ""
    return invalid(f"{where}at most {broken} fit into a body", param, "too_large")


def _broken_limit(data: bytes | bytearray) -> str | None:
    """Return the limit that a JSON text breaks: what stands outside its strings is counted."""
    if len(data) <= MAX_OBJECTS:
        return None
    plain = _unescaped(data)
    if plain.count(b'"') // 2 > MAX_STRINGS:
        return f"{MAX_STRINGS:,} strings"
    outside = _outside_strings(plain)
    objects = outside.count(b"{")
    if objects > MAX_OBJECTS:
        return f"{MAX_OBJECTS:,} objects"
    # Each stands after a comma or a bracket.
    if objects + outside.count(b"[") + outside.count(b",") > MAX_VALUES:
        return f"{MAX_VALUES:,} values"
    return None

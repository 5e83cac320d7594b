"""Long lists of token ids, read past a body's schema.

Covers reading them in pieces. Does not cover what a body may hold (`pie.router.api.bulk`) or its other fields
(`pie.router.api.body`). A schema reads half a million ids in 47 ms, in which no other thread of Python runs;
this takes a third of that, a few milliseconds at a time.
"""

from __future__ import annotations

import msgspec
from pydantic import BaseModel

LONG_BYTES = 128 << 10
"""A shorter list is left to its schema."""
_PIECE_BYTES = 256 << 10
_LISTS = ("prompt", "tokens")
"""Fields that may be one list of token ids."""
_fields_of = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode = msgspec.json.Decoder(list[int]).decode


def without_long_ids(
    kind: type[BaseModel], data: bytes | bytearray
) -> tuple[bytes | bytearray, dict[str, list[int]]]:
    """Return a body with one id in place of each long list of ids, and those lists.

    What is no list of whole numbers stays for the schema to judge.
    """
    names = [name for name in _LISTS if name in kind.model_fields]
    if not names:
        return data, {}
    try:
        fields = _fields_of(data)
    except (msgspec.MsgspecError, RecursionError):
        return data, {}
    found: dict[str, list[int]] = {}
    for name in names:
        raw = bytes(fields.get(name, b""))
        if len(raw) > LONG_BYTES and raw[:1] == b"[" and raw.find(b"[", 1) < 0:
            try:
                found[name] = _read(raw[1:-1])
            except msgspec.DecodeError:
                continue
    if not found:
        return data, {}
    short = msgspec.Raw(b"[0]")
    return msgspec.json.encode({**fields, **dict.fromkeys(found, short)}), found


def _read(inner: bytes) -> list[int]:
    """Return the ids between the brackets of a list."""
    ids: list[int] = []
    at = 0
    while at < len(inner):
        cut = inner.find(b",", at + _PIECE_BYTES)
        cut = len(inner) if cut < 0 else cut
        ids += _decode(b"[" + inner[at:cut] + b"]")
        at = cut + 1
    return ids

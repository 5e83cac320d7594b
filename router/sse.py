"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""


class TypedEvent(msgspec.Struct):
    """An event that has a name, which its data has as well."""

    type: str


_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    """Return one event; JSON has no line breaks of its own."""
    data = b"data: " + _encode(content) + b"\n\n"
    return (
        b"event: " + content.type.encode() + b"\n" + data
        if isinstance(content, TypedEvent)
        else data
    )

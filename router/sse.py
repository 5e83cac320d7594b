"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of every stream."""

_encode = msgspec.json.Encoder().encode


def event(content: object) -> bytes:
    """Return one event; JSON has no line breaks of its own."""
    return b"data: " + _encode(content) + b"\n\n"

"""Why JSON could not be read, where the decoder's own words name another reason.

Covers half of a surrogate pair, which msgspec calls data that ends too soon. Does not cover decoding
(`pie.wire.codec`).
"""

from __future__ import annotations

import json

_NOT_SO = ("Input data was truncated", "surrogate")
"""What is said of it, in part."""


def why_malformed(data: bytes | str, error: Exception) -> str:
    """Return why `data` could not be decoded: what `error` says, unless it is a text that is not Unicode."""
    said = str(error)
    if not any(one in said for one in _NOT_SO):
        return said
    try:
        # Python's own decoder takes half of a pair, and refuses what really ends too soon.
        json.loads(data)
    except (ValueError, RecursionError):
        return said
    return "a text in it is not valid Unicode: half of a surrogate pair (`\\ud800` to `\\udfff`) stands alone"

"""What a store of pages says when it is asked for one.

Covers the four answers. Does not cover the stores (`pie.pool.tier`) or how an answer travels
(`pie.wire.messages`).
"""

from __future__ import annotations

import enum


class LookupStatus(enum.IntEnum):
    """What a store knows of a page."""

    MISS = 0
    HIT = 1
    PENDING = 2
    """Somebody is writing it."""
    RETRY = 3
    """Cannot say now; ask again."""

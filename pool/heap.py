"""Large blocks of memory go back to the system when they are freed.

Covers one setting of glibc, for a process that is a pool node. Does not cover what a node takes.

glibc keeps what it thinks will be needed again, and after a start over a million pages that is 100 bytes a page. With
a fixed limit every array above it is mapped for itself.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3
_LIMIT_BYTES = 256 << 10


def give_back_large_blocks() -> None:
    """Set the limit for this process; other C libraries than glibc have none, and nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LIMIT_BYTES)

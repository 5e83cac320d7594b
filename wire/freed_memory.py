"""What becomes of memory that received frames have left.

Covers telling the C library to keep some of it. Does not cover frames (`pie.wire.frames`).

zmq takes memory for each large frame from the C library. glibc takes what is larger than 128 KiB from the
system, and gives it back when the frame is gone, so that every page of memory is faulted in anew for every
frame: that is 236,000 faults and half a second for each gigabyte received, more than all copies and
checksums together. It learns from what is freed, and ends at the limits that are set here once it has seen a
block of 32 MiB come and go.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Names of `mallopt`, as in malloc.h."""

_MAPPED_FROM_BYTES = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES = 64 << 20
"""Unused memory at the end of a heap that is kept: what a connection's credit lets come in at once."""


@functools.cache
def keep() -> None:
    """Keep freed memory for the next frames; without effect where the C library is another than glibc."""
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        adjust(_TRIM_THRESHOLD, _KEPT_BYTES)

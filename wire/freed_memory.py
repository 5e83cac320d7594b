"""What becomes of memory that is freed.

Covers telling the C library to keep what received frames have left, and to keep nothing of what is large and
needed once. Does not cover frames (`pie.wire.frames`).

zmq takes memory for each large frame from the C library. glibc takes what is larger than 128 KiB from the
system, and gives it back when the frame is gone, so that every page of memory is faulted in anew for every
frame: that is 236,000 faults and half a second for each gigabyte received, more than all copies and
checksums together. It learns from what is freed, and ends at the limits that are set here once it has seen a
block of 32 MiB come and go.

What takes arrays as long as a table of pages, once, would leave as much behind: in a thread's own heap glibc keeps even
what `malloc_trim` is asked for, up to the same limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Names of `mallopt`, as in malloc.h."""

_MAPPED_FROM_BYTES = 32 << 20
"""The most that glibc takes."""
_MAPPED_ONCE_FROM_BYTES = 256 << 10
"""Large against what makes up the rest, small against a table of many pages."""
_KEPT_BYTES = 64 << 20
"""Unused memory at the end of a heap that is kept: what a connection's credit lets come in at once."""


@functools.cache
def keep() -> None:
    """Keep freed memory for the next frames; without effect where the C library is another than glibc."""
    _set(_MAPPED_FROM_BYTES)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Let all large blocks that are taken meanwhile, by any thread, go back to the system when they are freed.

    At the end what is free goes back too, and freed memory is kept as `keep` says. Without effect where the C
    library is another than glibc.
    """
    _set(_MAPPED_ONCE_FROM_BYTES)
    try:
        yield
    finally:
        _set(_MAPPED_FROM_BYTES)
        give_back()


def give_back() -> None:
    """Let the system have what is free now, but for what `keep` keeps at the end of threads' heaps."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _set(mapped_from_bytes: int) -> None:
    adjust = getattr(ctypes.CDLL(None), "mallopt", None)
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, mapped_from_bytes)
        adjust(_TRIM_THRESHOLD, _KEPT_BYTES)

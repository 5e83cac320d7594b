"""Reading a file that may be a pipe, without waiting for ever.

Covers a bound on how much is read and on how long a pipe is waited for, such as `<(…)` of a shell. Does not cover what
is read (`pie.policies.loader`).
"""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

_PIPE_S = 10.0
"""Longest that whoever writes into a pipe is waited for."""


def read_some(file: Path, most_bytes: int) -> bytes:
    """Return what a file holds, so many bytes of it at most.

    Raises:
        OSError: It cannot be read, or is a pipe that nobody has written to its end in time.
    """
    if not stat.S_ISFIFO(file.stat().st_mode):
        with file.open("rb") as stream:
            return stream.read(most_bytes)
    # Without waiting for a writer: opening would, without end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _from_pipe(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _from_pipe(descriptor: int, most_bytes: int) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    until_s = time.monotonic() + _PIPE_S
    text = b""
    while len(text) < most_bytes:
        # Nothing to read and nobody who writes is the end only once somebody has written.
        if not poll.poll(max(0.0, until_s - time.monotonic()) * 1_000):
            raise OSError(
                errno.ETIMEDOUT, f"it is a pipe that nobody has written to its end in {_PIPE_S:g} s"
            )
        some = os.read(descriptor, most_bytes - len(text))
        if not some:
            break
        text += some
    return text

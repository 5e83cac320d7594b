"""Reading a file that may be a pipe, without waiting for ever.

Covers a bound on how much is read and on how long a pipe is waited for, such as `<(…)` of a shell. Does not cover what
is read (`pie.policies.loader`, `pie.simulator.trace_file`).
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


def read_some(file: Path, most_bytes: int, *, most_s: float | None = None) -> bytes:
    """Return what a file holds, so many bytes of it at most.

    Args:
        file: What is read.
        most_bytes: Most bytes of it.
        most_s: How long whoever writes into a pipe may take for all of it, as long as something comes every 10 s;
            None for 10 s.

    Raises:
        OSError: It cannot be read, or is a pipe that nobody has written to its end in time.
    """
    if not stat.S_ISFIFO(file.stat().st_mode):
        with file.open("rb") as stream:
            return stream.read(most_bytes)
    # Without waiting for a writer: opening would, without end.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return _from_pipe(descriptor, most_bytes, _PIPE_S if most_s is None else most_s)
    finally:
        os.close(descriptor)


def _from_pipe(descriptor: int, most_bytes: int, most_s: float) -> bytes:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    until_s = time.monotonic() + most_s
    text = bytearray()
    while len(text) < most_bytes:
        left_s = until_s - time.monotonic()
        # Nothing to read and nobody who writes is the end only once somebody has written.
        if not poll.poll(max(0.0, min(left_s, _PIPE_S)) * 1_000):
            said = (
                f"nobody has written to its end in {most_s:g} s"
                if left_s <= _PIPE_S
                else f"nobody has written anything into for {_PIPE_S:g} s"
            )
            raise OSError(errno.ETIMEDOUT, f"it is a pipe that {said}")
        some = os.read(descriptor, most_bytes - len(text))
        if not some:
            break
        text += some
    return bytes(text)

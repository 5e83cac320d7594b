"""A trace's file or pipe: its beginning, and its lines within limits.

Covers what kind of file it is, pipes such as `<(…)` of a shell, and lines, which end with a line feed and with nothing
else. Does not cover what they say (`pie.simulator.mooncake`, `.lengths`, `.recorded`).
"""

from __future__ import annotations

import io
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pie.policies.reading import read_some
from pie.simulator.errors import TraceError

MOST_LINE_BYTES = 16 << 20
"""A longer line is a mistake: one of the longest prompt takes 250 kB."""
_MOST_PIPE_BYTES = 1 << 30
_MOST_PIPE_S = 600.0
_MARK = b"\xef\xbb\xbf"
"""What some programs begin UTF-8 with."""


def opened(file: Path) -> BinaryIO:
    """Return what a file or a pipe holds; a pipe is read to its end.

    Raises:
        OSError: It cannot be read.
        TraceError: It is neither, or holds too much.
    """
    mode = file.stat().st_mode
    if stat.S_ISREG(mode):
        return file.open("rb")
    if not stat.S_ISFIFO(mode):
        raise TraceError(
            str(file), ["must be a file, a pipe, or a folder that a router records to"]
        )
    data = read_some(file, _MOST_PIPE_BYTES + 1, most_s=_MOST_PIPE_S)
    if len(data) > _MOST_PIPE_BYTES:
        raise TraceError(
            str(file),
            [f"is a pipe with more than {_MOST_PIPE_BYTES >> 30} GiB; write it to a file"],
        )
    return io.BytesIO(data)


def lines_of(stream: BinaryIO, name: str) -> Iterator[str]:
    """Yield each line as text, with its end.

    Args:
        stream: Where they stand, from its beginning.
        name: What messages call it.

    Raises:
        OSError: It cannot be read.
        TraceError: A line is too long, or not UTF-8 text.
    """
    number = 0
    while line := stream.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES:
            raise TraceError(
                name,
                [f"line {number}: is longer than {MOST_LINE_BYTES >> 20} MiB, which is the most"],
            )
        if number == 1:
            line = line.removeprefix(_MARK)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise TraceError(
                name, [f"line {number}: is not UTF-8 text: byte {error.start + 1} of it"]
            ) from None

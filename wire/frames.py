"""Payload frames.

Covers what may be sent as a frame, and memory that is lent to zmq until it is done with it. Does
not cover what frames hold.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import Buffer

__all__ = ["COPY_BELOW_BYTES", "Buffer", "Loan", "frames_bytes"]

COPY_BELOW_BYTES = 65_536
"""Smaller frames are copied, which costs less than telling when zmq is done with them."""


class Loan:
    """Frames of one message that zmq may read until it is done, and what happens then.

    `release` is called once, on the event loop, after `close` and after the last frame that was
    lent is no longer referred to. Frames come back on zmq's threads.
    """

    def __init__(
        self,
        frames: Sequence[Buffer],
        release: Callable[[], None] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.frames = frames
        self.bytes = frames_bytes(frames)
        self._release = release
        self._loop = loop
        self._lock = threading.Lock()
        self._on_end: Callable[[Loan], None] | None = None
        # The sender's own hold, which `close` gives up.
        self._holds = 1

    @property
    def is_awaited(self) -> bool:
        """Whether somebody wants to know when it ends."""
        return self._release is not None

    def on_end(self, callback: Callable[[Loan], None]) -> None:
        """Call `callback` with this loan on the event loop, just before `release`."""
        self._on_end = callback

    def lend(self, frame: Buffer) -> Buffer:
        """Return a buffer over the same memory that reports when nobody refers to it."""
        if self._release is None or memoryview(frame).nbytes < COPY_BELOW_BYTES:
            return frame
        lent = np.frombuffer(memoryview(frame), dtype=np.uint8).view(_LentFrame)
        lent.loan = self
        with self._lock:
            self._holds += 1
        return lent.data

    def close(self) -> None:
        """Say that nothing more will be lent."""
        self.frames = ()
        self.returned()

    def returned(self) -> None:
        """Take a frame back."""
        with self._lock:
            self._holds -= 1
            if self._holds:
                return
        if self._release is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._on_end is not None:
            self._on_end(self)
        if self._release is not None:
            self._release()


class _LentFrame(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A view of a frame whose end the loan hears of. numpy, as a class of ours has no buffer."""

    loan: Loan | None = None

    def __del__(self) -> None:
        if self.loan is not None:
            self.loan.returned()


def frames_bytes(frames: Sequence[Buffer]) -> int:
    """Return the size of all frames."""
    return sum(memoryview(frame).nbytes for frame in frames)

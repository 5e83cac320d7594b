"""Memory that a client lends to nodes of its own host, so that pages are copied into it once.

Covers an area that one process makes and others map, and slots in it. Does not cover who asks for what
(`pie.pool.client`, `pie.pool.serving`).

The area is a file without a name (memfd): it is gone when the last process that has it mapped is, however that
ended. The other process opens it through `/proc/PID/fd`, which the system allows the same user alone, and
checks that it cannot be cut short (a process that touches memory that is gone is killed) and that it begins
with the words that the client has sent: in another container or on another host that number of a process
means something else.

A slot is free again when nobody refers to what landed in it. One whose answer never came is not used again,
because a node that was halted may still write there; an area with too many of those is left for a new one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pie.pool.errors import NotSharedError
from pie.pool.extents import ExtentAllocator, rounded

_NAME = "pie-pages"
_HEAD_BYTES = 4096
_TOKEN_BYTES = 32
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MOST_LOST = 4
"""A quarter of an area may be lost to answers that never came."""


class LandingArea:
    """Memory of this process that nodes write pages into. For one thread; what landed may end on any."""

    def __init__(self, size_bytes: int) -> None:
        """Reserve it; memory becomes resident as pages come, and stays.

        Raises:
            OSError: The system has no such memory.
        """
        self.size_bytes = _HEAD_BYTES + size_bytes
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, self.size_bytes)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
            self._memory = memoryview(mmap.mmap(self._file, self.size_bytes))
        except BaseException:
            os.close(self._file)
            raise
        self._memory[:_TOKEN_BYTES] = self.token
        self._extents = ExtentAllocator(size_bytes)
        self._lost_bytes = 0
        self._ended: deque[int] = deque()
        """Slots that are free again. Garbage is collected at any moment, also in the allocator."""

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    @property
    def file(self) -> int:
        """The descriptor by which this process has it."""
        return self._file

    @property
    def used_bytes(self) -> int:
        """Bytes of slots that are taken or lost."""
        self._free_ended()
        return self._extents.allocated_bytes

    @property
    def is_worn(self) -> bool:
        """Whether too much of it waits for answers that never came."""
        return self._lost_bytes * _MOST_LOST > self._extents.capacity

    def take(self, size_bytes: int) -> int | None:
        """Take a slot and return its offset, or None where there is no room."""
        self._free_ended()
        start = self._extents.allocate(size_bytes)
        return None if start is None else _HEAD_BYTES + start

    def landed(self, offset: int, size_bytes: int) -> memoryview:
        """Return what lies in a slot, which is free when nobody refers to it any more."""
        room = np.frombuffer(self._memory[offset : offset + size_bytes], np.uint8).view(_Landed)
        room.on_end = lambda: self.give_back(offset)
        room.flags.writeable = False
        return room.data

    def give_back(self, offset: int) -> None:
        """Free a slot that nobody writes to or reads."""
        self._ended.append(offset)

    def lose(self, size_bytes: int) -> None:
        """Count a slot as lost whose answer did not come: it stays taken."""
        self._lost_bytes += rounded(size_bytes)

    def _free_ended(self) -> None:
        while self._ended:
            self._extents.free(self._ended.popleft() - _HEAD_BYTES)


class _Landed(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """A view of a slot whose end is told. numpy, as a class of ours has no buffer."""

    on_end: Callable[[], None] | None = None

    def __del__(self) -> None:
        if self.on_end is not None:
            self.on_end()


class MappedArea:
    """Another process's area, for writing into."""

    def __init__(
        self, pid: int, file: int, size_bytes: int, token: bytes, limit_bytes: int
    ) -> None:
        """Map it.

        Raises:
            NotSharedError: It is not to be had, or not what the other process means.
        """
        path = Path(f"/proc/{pid:d}/fd/{file:d}")
        try:
            if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):
                raise NotSharedError("it is no area for pages")
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise NotSharedError(f"it cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(handle)
            if found.st_uid != os.geteuid() or found.st_size != size_bytes:
                raise NotSharedError("it is another one")
            if not _HEAD_BYTES < size_bytes <= limit_bytes:
                raise NotSharedError(f"it has {size_bytes} bytes, and {limit_bytes} are allowed")
            if fcntl.fcntl(handle, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise NotSharedError("it may be cut short")
            self._memory = memoryview(mmap.mmap(handle, size_bytes))
        except OSError as error:
            raise NotSharedError(f"it cannot be mapped: {error.strerror}") from error
        finally:
            os.close(handle)
        if bytes(self._memory[:_TOKEN_BYTES]) != token:
            raise NotSharedError("it is another one")

    def slot(self, offset: int, size_bytes: int) -> memoryview | None:
        """Return the room of a slot, or None where it is no part of the area."""
        if offset < _HEAD_BYTES or offset + size_bytes > self._memory.nbytes:
            return None
        return self._memory[offset : offset + size_bytes]

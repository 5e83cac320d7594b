"""What becomes of bad pages on disk: they go, or are set aside for somebody to look at.

Covers the folder that they are kept in and its limit. Does not cover finding them
(`pie.pool.disk`).
"""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path

from pie.page.errors import BadPageReason
from pie.pool.files import Files
from pie.pool.space import Space

_MOST_KEPT = 32


class SetAside:
    """The bad pages of one folder."""

    def __init__(self, path: Path, files: Files, space: Space, *, keep: bool) -> None:
        self._path = path
        self._files = files
        self._space = space
        self._keep = keep
        self._count = itertools.count()
        self._trimming = threading.Lock()

    def scan(self) -> None:
        """Count what earlier starts have set aside, and make the folder where it will be needed."""
        if self._keep:
            self._files.make_folder(self._path)
        if self._path.is_dir():
            self._space.found(self._files.allocated(self._path))
            for path in self._path.iterdir():
                self._space.found(self._files.allocated(path))

    def take_file(self, path: Path, reason: BadPageReason) -> int:
        """Take a bad file away, and return the physical bytes that it still takes.

        Raises:
            OSError: The disk does not let it go.
        """
        if not self._keep:
            self._files.unlink(path)
            return 0
        size = self._files.allocated(path)
        self._files.rename(path, self._new_path(path.name, reason))
        return size

    def take_bytes(self, name: str, data: bytes, reason: BadPageReason) -> None:
        """Keep a copy of a bad page that lay in a pack, where that is wanted and there is room.

        Raises:
            OSError: The disk does not take it.
        """
        taken = len(data) + self._files.block_bytes(self._path) if self._keep else 0
        if not self._keep or not self._space.take(taken):
            return
        size = 0
        try:
            size = self._files.write_new(self._new_path(name, reason), [data], sync=False)
        finally:
            self._space.give(max(0, taken - size))
        self.trim()

    def _new_path(self, name: str, reason: BadPageReason) -> Path:
        # Of this process, so that no earlier one's is overwritten.
        return self._path / f"{name}.{reason.value}.{os.getpid()}-{next(self._count)}"

    def trim(self) -> None:
        """Let the oldest go, where there are too many.

        Raises:
            OSError: The disk does not let them go.
        """
        if not self._keep:
            return
        with self._trimming:  # A file's bytes are given back once.
            kept = sorted(self._path.iterdir(), key=lambda path: path.lstat().st_mtime_ns)
            for path in kept[:-_MOST_KEPT]:
                size = self._files.allocated(path)
                self._files.unlink(path)
                self._space.give(size)

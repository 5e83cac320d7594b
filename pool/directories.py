"""The directories that page files lie in, and the physical bytes that they take themselves.

Covers making a directory for its first file and removing it after its last. Does not cover files
(`pie.pool.folder`). A directory of ext4 takes 4 KiB and one more for about 50 names: of pages of
64 KiB that is up to 6 %, so it counts.
"""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path

from pie.pool.files import Files


@dataclass(slots=True)
class _Directory:
    files: int = 0
    bytes: int = 0


class Directories:
    """Those directories below `top` that hold page files. Thread-safe; the lock is held for no I/O."""

    def __init__(self, top: Path, files: Files) -> None:
        self._top = top
        self._files = files
        self._known: dict[Path, _Directory] = {}
        self._lock = threading.Lock()

    def enter(self, directory: Path) -> None:
        """Count one more file in a directory, and so in those above it."""
        with self._lock:
            for path in self._line(directory):
                self._known.setdefault(path, _Directory()).files += 1

    def measure(self, directory: Path) -> int:
        """Return by how many bytes a directory and those above it have grown since the last look."""
        grown = 0
        for path in self._line(directory):
            size = self._files.allocated(path)
            with self._lock:
                known = self._known.get(path)
                if known is not None:
                    grown += size - known.bytes
                    known.bytes = size
        return grown

    def leave(self, directory: Path) -> int:
        """Count one file less, remove what is empty now, and return the bytes that this freed."""
        freed = 0
        empty = []
        with self._lock:
            for path in self._line(directory):
                known = self._known[path]
                known.files -= 1
                if not known.files:
                    freed += known.bytes
                    del self._known[path]
                    empty.append(path)
        for path in empty:
            # Whoever enters it just now makes it again, or has put a file there already.
            with contextlib.suppress(OSError):
                self._files.remove_folder(path)
        return freed

    def _line(self, directory: Path) -> list[Path]:
        """Return a directory and those above it, up to but without the top."""
        line = [directory]
        while line[-1].parent != self._top:
            line.append(line[-1].parent)
        return line

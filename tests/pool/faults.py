"""A disk that fails when a test says so."""

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer

from pie.pool.files import Files

CALLS = sorted(name for name in vars(Files) if not name.startswith("_"))
"""All that can fail."""


class FaultyFiles(Files):
    """Raises `OSError` with the number that `numbers` has for a method."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.free = 1 << 60

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        if number := self.numbers.get(name):
            raise OSError(number, os.strerror(number))

    def fill(self) -> None:
        """Let everything that writes find a full disk."""
        for name in ("write_new", "write_at", "append", "make_folder"):
            self.numbers[name] = errno.ENOSPC

    def write_new(self, path: Path, chunks: Sequence[Buffer], *, sync: bool) -> int:
        if "write_new" in self.numbers:  # Half of it is on the disk already.
            super().write_new(path, chunks[: len(chunks) // 2], sync=sync)
        self._call("write_new")
        self.calls["synced write"] += sync
        return super().write_new(path, chunks, sync=sync)

    def write_at(self, path: Path, offset: int, chunks: Sequence[Buffer], *, sync: bool) -> None:
        if "write_at" in self.numbers:
            super().write_at(path, offset, chunks[: len(chunks) // 2], sync=sync)
        self._call("write_at")
        self.calls["synced write"] += sync
        super().write_at(path, offset, chunks, sync=sync)

    def append(self, path: Path, record: bytes, *, create: bool, sync: bool) -> None:
        if "append" in self.numbers:
            super().append(path, record[: len(record) // 2], create=create, sync=sync)
        self._call("append")
        super().append(path, record, create=create, sync=sync)

    def read(self, path: Path) -> memoryview:
        self._call("read")
        return super().read(path)

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        self._call("read_at")
        return super().read_at(path, offset, size)

    def will_need(self, path: Path) -> None:
        self._call("will_need")
        super().will_need(path)

    def truncate(self, path: Path, size: int) -> None:
        self._call("truncate")
        super().truncate(path, size)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._call("unlink")
        super().unlink(path)

    def make_folder(self, path: Path) -> None:
        self._call("make_folder")
        super().make_folder(path)

    def remove_folder(self, path: Path) -> bool:
        self._call("remove_folder")
        return super().remove_folder(path)

    def sync(self, path: Path) -> None:
        self._call("sync")
        super().sync(path)

    def allocated(self, path: Path) -> int:
        self._call("allocated")
        return super().allocated(path)

    def block_bytes(self, path: Path) -> int:
        self._call("block_bytes")
        return super().block_bytes(path)

    def free_bytes(self, path: Path) -> int:
        self._call("free_bytes")
        return min(self.free, super().free_bytes(path))

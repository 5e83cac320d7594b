"""System calls that the disk tier makes, in one place.

Covers what is done to one file or folder. Does not cover which (`pie.pool.folder`,
`pie.pool.packs`) or what a failure means (`pie.pool.folder`). Tests put faults here.

Every method may wait for the disk and may raise `OSError`, which is a `NotAFileError` where something else has the
name of a file that is to be read or written. Nothing waits for what is at a pipe's other end.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from typing_extensions import Buffer

_BLOCK_BYTES = 512
"""Unit of `st_blocks`, whatever the file system's own is."""
_POPULATE_READ = 22
"""`MADV_POPULATE_READ`, which Python does not name yet; Linux 5.14 and later."""
_UNREADABLE = {errno.EFAULT, getattr(errno, "EHWPOISON", 133)}
"""What filling a map says where a read would say `EIO`. Others, such as too little memory, are not the
disk's fault."""
_MOST_PIECES = 512
_NO_FILE = {errno.EISDIR, errno.ELOOP, errno.ENXIO}
"""What opening says of a folder, a link to itself, and a pipe or socket that nobody reads."""


class NotAFileError(OSError):
    """Something else than a file has a file's name; the disk is well."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "is not a regular file", str(path))


class Files:
    """Does what it is told to, at once. Thread-safe."""

    def write_new(self, path: Path, chunks: Sequence[Buffer], *, sync: bool) -> int:
        """Write a file that is not there yet and return the physical bytes that it takes."""
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(handle, chunks, 0)
            if sync:
                os.fdatasync(handle)
            return os.fstat(handle).st_blocks * _BLOCK_BYTES
        finally:
            os.close(handle)

    def write_at(self, path: Path, offset: int, chunks: Sequence[Buffer], *, sync: bool) -> None:
        """Write in a file that is there or not, from `offset` on."""
        handle = _opened(path, os.O_WRONLY | os.O_CREAT)
        try:
            _write_all(handle, chunks, offset)
            if sync:
                os.fdatasync(handle)
        finally:
            os.close(handle)

    def append(self, path: Path, record: bytes, *, create: bool, sync: bool) -> None:
        """Write at a file's end; whole records of several threads do not mix."""
        handle = _opened(path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if create else 0))
        try:
            if os.write(handle, record) != len(record):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if sync:
                os.fdatasync(handle)
        finally:
            os.close(handle)

    def read(self, path: Path) -> memoryview:
        """Return a file's bytes as a map of them, already in memory.

        The map outlives the file's name. It is filled here because an error of the disk, which is
        an exception here, is a signal that ends the process where a map is read.
        """
        handle = _opened(path, os.O_RDONLY)
        try:
            size = os.fstat(handle).st_size
            if not size:
                return memoryview(b"")
            pages = mmap.mmap(handle, size, prot=mmap.PROT_READ)
            try:
                pages.madvise(_POPULATE_READ)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    return memoryview(_read_all(handle, 0, size))  # A kernel before 5.14.
                number = errno.EIO if error.errno in _UNREADABLE else error.errno or errno.EIO
                raise OSError(number, os.strerror(number), str(path)) from error
            return memoryview(pages)
        finally:
            os.close(handle)

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        """Return a copy of at most `size` bytes of a file; less where it ends before."""
        handle = _opened(path, os.O_RDONLY)
        try:
            return _read_all(handle, offset, size)
        finally:
            os.close(handle)

    def size(self, path: Path) -> int:
        """Return a file's length."""
        handle = _opened(path, os.O_RDONLY)
        try:
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def will_need(self, path: Path) -> None:
        """Let the system begin to read a file; one that is not there is no error."""
        with contextlib.suppress(OSError):
            handle = _opened(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)

    def truncate(self, path: Path, size: int) -> None:
        """Cut a file off."""
        os.truncate(path, size)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name, over whatever had it."""
        try:
            source.rename(target)
        except IsADirectoryError as error:
            raise NotAFileError(target) from error

    def unlink(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""
        try:
            path.unlink(missing_ok=True)
        except IsADirectoryError as error:
            raise NotAFileError(path) from error

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def remove_folder(self, path: Path) -> bool:
        """Remove a folder if it is empty; say whether it is gone."""
        try:
            path.rmdir()
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
                raise
            return False
        return True

    def sync(self, path: Path) -> None:
        """Wait until a file or folder is on the disk; one that is gone is no error."""
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def allocated(self, path: Path) -> int:
        """Return the physical bytes that a file or folder takes; 0 where it is not there."""
        try:
            return path.lstat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            return 0

    def allocated_below(self, path: Path) -> int:
        """Return the physical bytes that a file takes, or a folder and all in it; 0 where it is not there."""
        inside = path.iterdir() if path.is_dir() and not path.is_symlink() else ()
        return self.allocated(path) + sum(map(self.allocated_below, inside))

    def block_bytes(self, path: Path) -> int:
        """Return the unit in which the file system of `path` hands out bytes."""
        return max(os.statvfs(path).f_frsize, _BLOCK_BYTES)

    def free_bytes(self, path: Path) -> int:
        """Return the bytes that the file system of `path` has left for us."""
        left = os.statvfs(path)
        return left.f_bavail * left.f_frsize


def _opened(path: Path, flags: int) -> int:
    """Open a file, and nothing else."""
    try:
        handle = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotAFileError(path) from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAFileError(path)
    return handle


def _write_all(handle: int, chunks: Sequence[Buffer], offset: int) -> None:
    left = [view for view in (memoryview(chunk).cast("B") for chunk in chunks) if view.nbytes]
    while left:
        written = os.pwritev(handle, left[:_MOST_PIECES], offset)
        offset += written
        while left and written >= left[0].nbytes:
            written -= left.pop(0).nbytes
        if written:
            left[0] = left[0][written:]


def _read_all(handle: int, offset: int, size: int) -> bytes:
    pieces = []
    while size:
        piece = os.pread(handle, size, offset)
        if not piece:
            break
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)

"""Pages at rest, looked at from outside: what lies in a folder or a tar file.

Covers listing, reading and removing page files where no node serves them. Does not cover buckets
(`pie.pool.bucket_source`), the tiers, which own what they hold (`pie.pool.disk`), or who asks
(`pie.cluster.pages`).

Nothing is changed but by `remove`, so that a folder can be looked at while a node uses it: what is seen
then is as it was at some moment of the call, page by page.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pie.page.errors import BadPage, BadPageReason
from pie.page.format import HEAD_BYTES, FileHeader, parse_page_name
from pie.page.header import PageHeader
from pie.pool.errors import FolderInUseError
from pie.pool.files import Files, NotAFileError
from pie.pool.pack_index import Came, Left, decode_records, encode_record
from pie.pool.sealing import Sealing


class PageAtRest(NamedTuple):
    """A page file, or what should be one."""

    where: str
    """Name below the source; with `@` and an offset where it lies in a pack."""
    offset: int
    file_bytes: int
    stored_ns: int
    header: PageHeader | None
    """None where it cannot be read; `problem` says why."""
    key_id: bytes | None = None
    """Which key it is encrypted with; None where it is not."""
    problem: str = ""

    @property
    def path(self) -> str:
        """Name of the file that it lies in."""
        return self.where.partition("@")[0]


class Source(Protocol):
    """Where pages lie."""

    name: str
    tier: str
    """`disk` or `object`."""

    def pages(self) -> Iterator[PageAtRest]:
        """List all pages, by their headers alone.

        Raises:
            OSError: It cannot be read.
        """
        ...

    def read(self, page: PageAtRest) -> bytes:
        """Return a page's whole file; less where it is not whole.

        Raises:
            OSError: It cannot be read, or has left meanwhile.
        """
        ...

    def remove(self, pages: Sequence[PageAtRest]) -> None:
        """Remove pages.

        Raises:
            FolderInUseError: A running node owns them.
            OSError: One cannot be removed; some may be gone.
        """
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class FolderSource:
    """A node's folder, or any other with page files in it."""

    tier = "disk"

    def __init__(self, path: Path, sealing: Sealing) -> None:
        """Look at a folder; `sealing` reads headers."""
        self.name = str(path)
        self._path = path
        self._sealing = sealing
        self._files = Files()
        self._lock_handle: int | None = None

    def pages(self) -> Iterator[PageAtRest]:
        """List the pages in packs and in files of their own."""
        packs = self._path / "packs"
        for index in sorted(packs.glob("*.list")) if packs.is_dir() else ():
            yield from self._packed(index)
        for root in sorted(self._path.iterdir()):
            if root.is_dir():
                for path in sorted(root.glob("??/*")):
                    page = self._file(path)
                    if page is not None:
                        yield page

    def read(self, page: PageAtRest) -> bytes:
        """Return a page's whole file."""
        return self._files.read_at(self._path / page.path, page.offset, page.file_bytes)

    def remove(self, pages: Sequence[PageAtRest]) -> None:
        """Remove pages' files, or mark them as dead in their packs: the node gives that room back."""
        self._own()
        for page in pages:
            self._remove(page)

    def _remove(self, page: PageAtRest) -> None:
        path = self._path / page.path
        if "@" not in page.where:
            self._files.unlink(path)
            with contextlib.suppress(OSError):
                if self._files.remove_folder(path.parent):
                    self._files.remove_folder(path.parent.parent)
        elif page.header is not None:
            left = encode_record(Left(page.offset, page.header.key), self._sealing.secret)
            self._files.append(path.with_suffix(".list"), left, create=False, sync=True)

    def close(self) -> None:
        """Let go of the folder's lock."""
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def _own(self) -> None:
        """Hold the lock of a node's folder, so that no node starts meanwhile."""
        lock = self._path / ".lock"
        if self._lock_handle is not None or not lock.exists():
            return
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise FolderInUseError(
                f"{self._path} belongs to a node that is running: stop it first; nothing was changed"
            ) from None
        self._lock_handle = handle

    def _packed(self, index: Path) -> Iterator[PageAtRest]:
        name = f"packs/{index.name}"
        try:
            data = self._files.read_at(index, 0, self._files.size(index))
        except FileNotFoundError:
            return  # Compacted this very moment.
        except NotAFileError as error:
            yield PageAtRest(name, 0, 0, 0, None, None, str(error))
            return
        records, is_whole = decode_records(data, self._sealing.secret)
        pages: dict[int, Came] = {}
        for record in records:
            if isinstance(record, Left):
                pages.pop(record.offset, None)
            else:
                pages[record.offset] = record
        pack = f"packs/{index.stem}.pack"
        for at, came in pages.items():
            where = f"{pack}@{at}"
            yield PageAtRest(where, at, came.length, came.stored_ns, came.header, came.key_id)
        if not is_whole:
            problem = "some of its records are damaged, or were written with another secret"
            stat = index.stat()
            yield PageAtRest(name, 0, stat.st_size, stat.st_mtime_ns, None, None, problem)

    def _file(self, path: Path) -> PageAtRest | None:
        name = path.relative_to(self._path).as_posix()
        wanted = parse_page_name(name)
        if wanted is None:
            return None
        try:
            stat = path.lstat()
            head = self._files.read_at(path, 0, HEAD_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return PageAtRest(name, 0, 0, 0, None, None, str(error))
        return described(name, head, stat.st_size, stat.st_mtime_ns, self._sealing)


class TarSource:
    """A tar file that pages were exported to."""

    tier = "disk"

    def __init__(self, path: Path, sealing: Sealing) -> None:
        """Open a tar file.

        Raises:
            OSError: It cannot be read or is none.
        """
        self.name = str(path)
        self._sealing = sealing
        try:
            Files().size(path)  # A pipe would never end.
            self._tar = tarfile.open(path)  # noqa: SIM115 - `close` closes it
        except tarfile.TarError as error:
            raise OSError(f"{path} is not a tar file: {error}") from error

    def pages(self) -> Iterator[PageAtRest]:
        """List the pages; other members are passed over."""
        try:
            for member in self._tar:
                if member.isfile() and parse_page_name(member.name) is not None:
                    head = self._bytes(member.name, HEAD_BYTES)
                    stored_ns = int(member.mtime * 1e9)
                    yield described(member.name, head, member.size, stored_ns, self._sealing)
        except tarfile.TarError as error:
            raise OSError(f"{self.name} is damaged: {error}") from error

    def read(self, page: PageAtRest) -> bytes:
        """Return a page's whole file."""
        return self._bytes(page.where, page.file_bytes)

    def remove(self, pages: Sequence[PageAtRest]) -> None:
        """Refuse: a tar file is only written as a whole."""
        raise OSError(f"{self.name} is a tar file: {pages[0].where} cannot be removed from it")

    def close(self) -> None:
        """Close the file."""
        self._tar.close()

    def _bytes(self, name: str, size: int) -> bytes:
        try:
            with self._tar.extractfile(name) or io.BytesIO() as member:
                return member.read(size)
        except (tarfile.TarError, KeyError) as error:
            raise OSError(f"{self.name} is damaged: {error}") from error


def described(
    name: str, head: bytes, file_bytes: int, stored_ns: int, sealing: Sealing
) -> PageAtRest:
    """Return what a page file of a name says of itself, or what is wrong with it."""
    try:
        found: FileHeader = sealing.open_head(head, file_bytes)
    except BadPage as error:
        return PageAtRest(name, 0, file_bytes, stored_ns, None, None, str(error))
    header = found.header
    if (header.model_root, header.key, header.part) != parse_page_name(name):
        problem = f"wrong_page: its name is another page's than {header.key.hex()}"
        return PageAtRest(name, 0, file_bytes, stored_ns, None, found.key_id, problem)
    return PageAtRest(name, 0, file_bytes, stored_ns, header, found.key_id)


def may_be_of_another_secret(problem: str) -> bool:
    """Say whether what is wrong with a page may be that it was written with another secret."""
    return problem.startswith(_KEYED) or "another secret" in problem


_KEYED = tuple(f"{reason.value}:" for reason in (BadPageReason.FOREIGN, BadPageReason.HEADER))


def problem_of(source: Source, page: PageAtRest, sealing: Sealing) -> str:
    """Read a page as a whole and return what is wrong with it; nothing where it is good."""
    if page.header is None:
        return page.problem
    try:
        found, _ = sealing.open(source.read(page), key=page.header.key, part=page.header.part)
    except BadPage as error:
        return str(error)
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    return "" if found == page.header else "header: it is not what the list of its pack says"

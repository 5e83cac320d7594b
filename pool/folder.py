"""One folder of the disk tier.

Covers its lock, storing, loading and removing one page in it, and finding what an earlier process
left. Does not cover which folder a page goes to or who may have it (`pie.pool.disk`).

    .lock                           held by the process that uses the folder
    tmp/                            page files that are being written
    packs/N.pack, packs/N.list      small pages, many to a file (`pie.pool.packs`)
    uses                            how often pages were used (`pie.pool.kept_uses`)
    bad/                            bad pages that were set aside, where that is wanted
    <model root>/<kk>/<key>.<part>  page files
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pie.page.errors import BadPage, BadPageReason
from pie.page.format import HEAD_BYTES, page_name, parse_page_name
from pie.page.header import PageHeader
from pie.page.key import KEY_BYTES
from pie.pool.directories import Directories
from pie.pool.errors import FolderInUseError
from pie.pool.files import Files, NotAFileError
from pie.pool.health import Health
from pie.pool.kept_uses import MOST_BYTES, decoded, encoded
from pie.pool.pack_index import CameColumns, PackList
from pie.pool.packs import Pack, Packs, Slot
from pie.pool.sealing import Sealing
from pie.pool.set_aside import SetAside
from pie.pool.settings import Durability
from pie.pool.space import Claim, Space
from pie.pool.syncer import Syncer
from pie.pool.tier import PageId

SMALL_BYTES = 64 << 10
"""Payloads that are packed to less go into packs: in files of their own, blocks and names would cost too much."""
FRAME_BYTES = 4096
"""What a page file takes beside its payload, at most: 2.5 KB, and names of up to 128 characters."""

_LOCK_POLL_S = 0.05
_RENAMES = 8


@dataclass(slots=True)
class Home:
    """Where a page lies: in a slot of a pack or in a file of its own."""

    folder: Folder
    slot: Slot | None
    file_bytes: int
    """Physical bytes of its own file."""


class FoundPage(NamedTuple):
    """A page that an earlier process left."""

    header: PageHeader
    home: Home
    stored_ns: int
    is_locked: bool
    """Whether it is encrypted with a key that is not here."""


class FoundPack(NamedTuple):
    """A pack that an earlier process left, and pages in it that can be read."""

    folder: Folder
    pack: Pack
    came: CameColumns


class Folder:
    """Pages in one folder. Thread-safe. What may wait for the disk may raise `OSError`."""

    def __init__(
        self,
        path: Path,
        space: Space,
        *,
        files: Files,
        sealing: Sealing,
        durability: Durability,
        keep_bad_pages: bool,
        pack_bytes: int,
        failed: Callable[[Folder, OSError, str], object],
        clock: Callable[[], float],
    ) -> None:
        """Prepare; nothing is looked at before `open`.

        Args:
            path: The folder.
            space: What it takes is taken from it.
            files: Makes the system calls.
            sealing: How page files are made and read.
            durability: When a page is on the disk for sure.
            keep_bad_pages: Set bad pages aside instead of removing them.
            pack_bytes: A pack of this size takes no more pages.
            failed: Told what the disk refused beside a call, and of what that came.
            clock: Seconds, going forward only.
        """
        self.path = path
        self.health = Health(str(path), clock)
        self.bad_pages: Counter[str] = Counter()
        """Bad pages that were found, by reason."""
        self._files = files
        self._space = space
        self._sealing = sealing
        self._durability = durability
        self._is_safe = durability is Durability.ALWAYS
        self._syncer: Syncer | None = None
        self._temp = path / "tmp"
        self._temp_names = itertools.count()
        self._uses = path / "uses"
        self._directories = Directories(path, files)
        self._set_aside = SetAside(path / "bad", files, space, keep=keep_bad_pages)
        self._pack_bytes = pack_bytes
        self._failed = failed
        self._lock_handle: int | None = None
        self.block_bytes = 4096
        self.packs = self._make_packs()

    def open(self, lock_timeout_s: float = 0.0) -> bool:
        """Take the folder into use; say whether it can be read.

        Raises:
            FolderInUseError: Another process uses it, and still does after `lock_timeout_s`.
        """
        try:
            with contextlib.suppress(PermissionError):
                self._files.make_folder(self.path)
            self._lock(lock_timeout_s)
            self.block_bytes = self._files.block_bytes(self.path)
        except OSError as error:
            self.health.failed(error, "open")
            return False
        self.packs = self._make_packs()
        try:
            for path in (self._temp, self.packs.path):
                self._files.make_folder(path)
            for path in self._temp.iterdir():
                self._files.unlink(path)
        except OSError as error:
            self.health.failed(error, "store")
        if self._durability is Durability.BATCH:
            self._syncer = Syncer(self._files, lambda _, error: self._failed(self, error, "sync"))
        return True

    @property
    def is_there(self) -> bool:
        """Whether what `open` made is still there."""
        return self._temp.is_dir() and self.packs.path.is_dir()

    def scan(self) -> Iterator[FoundPage | FoundPack]:
        """Find the pages that are there, by their headers alone; bad ones are taken away.

        Everything of ours is counted as taken. Files that are not ours are left alone.
        """
        own = (self.path, self.path / ".lock", self._temp, self.packs.path, self._uses)
        self._space.found(sum(self._files.allocated(path) for path in own))
        with contextlib.suppress(OSError):
            self._set_aside.scan()
        if self.packs.path.is_dir():
            for pack, listed in self.packs.scan():
                self.bad_pages["torn_pack"] += not listed.is_whole
                yield from self._in_pack(pack, listed)
        for directory in self._page_directories():
            for path in sorted(directory.iterdir()):
                page = self._scan_file(path)
                if page is not None:
                    yield page
            self._space.found(self._directories.measure(directory))
            with contextlib.suppress(OSError):
                self._files.remove_folder(directory)

    def store(self, header: PageHeader, payload: memoryview, claim: Claim) -> Home | None:
        """Write a page, so that it is there as a whole or not at all.

        Returns None where it takes more than the claim, and there is no more.
        """
        sealed = self._sealing.seal(header, payload)
        if sealed.packed_bytes >= SMALL_BYTES:
            home = self._store_file(header, sealed.chunks, claim)
        else:
            slot = self.packs.store(header, sealed.chunks, claim, key_id=sealed.key_id)
            if slot is not None and self._syncer is not None:
                self._syncer.add(self.packs.paths(slot.pack), [self.packs.path])
            home = None if slot is None else Home(self, slot, 0)
        self.health.worked("store")
        return home

    def load(self, header: PageHeader, home: Home) -> memoryview:
        """Return a page's payload, checked.

        Raises:
            BadPage: It is not the page that was stored.
        """
        data = self._read(header, home)
        found, payload = self._sealing.open(data, key=header.key, part=header.part)
        if found != header:
            raise BadPage(BadPageReason.WRONG_PAGE, f"its header is {found}")
        self.health.worked("load")
        return payload

    def expect(self, header: PageHeader, home: Home) -> None:
        """Let the system begin to read a page that will be loaded soon."""
        if home.slot is None:
            with contextlib.suppress(OSError):  # The load itself finds out.
                self._files.will_need(self._path(header))

    def remove(self, header: PageHeader, home: Home) -> None:
        """Remove a page."""
        if home.slot is not None:
            self.packs.remove(home.slot, header.key)
            return
        path = self._path(header)
        self._files.unlink(path)
        self._space.give(home.file_bytes + self._directories.leave(path.parent))

    def discard(self, header: PageHeader, home: Home, reason: BadPageReason) -> None:
        """Take a bad page away, or set it aside."""
        if home.slot is not None:
            name = self._path(header).name
            with contextlib.suppress(OSError):
                self._set_aside.take_bytes(name, self.packs.read(home.slot), reason)
            self.packs.remove(home.slot, header.key)
            return
        path = self._path(header)
        kept = self._set_aside.take_file(path, reason)
        self._space.give(home.file_bytes + self._directories.leave(path.parent))
        self._space.found(kept)
        with contextlib.suppress(OSError):
            self._set_aside.trim()

    def has_room(self, size: int) -> bool:
        """Say whether the disk has so many bytes left, as far as it can say."""
        try:
            return self._files.free_bytes(self.path) >= size
        except OSError:
            return True  # A store will find out.

    def keep_uses(self, uses: Mapping[PageId, int]) -> bool:
        """Write the file of uses anew, as a whole; say whether there was room."""
        data = encoded(uses, self._sealing.secret)
        claim = self._space.claim(len(data) + 2 * self.block_bytes)
        if claim is None:
            return False
        temp = self._temp / str(next(self._temp_names))
        try:
            size = self._files.write_new(temp, [data], sync=self._is_safe)
            before = self._files.allocated(self._uses)
            if not claim.spend(size):
                return False
            try:
                self._files.rename(temp, self._uses)
            except OSError as error:
                claim.spend(-size)
                if isinstance(error, NotAFileError):
                    return False
                raise
            claim.spend(-before)
            return True
        finally:
            claim.close()
            with contextlib.suppress(OSError):
                self._files.unlink(temp)

    def kept_uses(self) -> dict[PageId, int]:
        """Return what the file of uses says; nothing where there is none, or none of ours."""
        try:
            data = self._files.read_at(self._uses, 0, MOST_BYTES)
        except (FileNotFoundError, NotAFileError):
            return {}
        return decoded(data, self._sealing.secret)

    def close(self) -> None:
        """Bring what was written to the disk and let another process have the folder."""
        if self._syncer is not None:
            self._syncer.close()
            self._syncer = None
        if self._lock_handle is not None:
            os.close(self._lock_handle)
            self._lock_handle = None

    def _in_pack(self, pack: Pack, listed: PackList) -> Iterator[FoundPage | FoundPack]:
        """Return the pages of a pack together, but those whose key is not here, and others, one by one."""
        columns = listed.columns
        locked = [not self._sealing.reads(shared.key_id) for shared in columns.shared]
        is_locked = np.array(locked, bool)[columns.shared_of]
        yield FoundPack(self, pack, columns.take(np.flatnonzero(~is_locked)))
        for came in [*columns.came(np.flatnonzero(is_locked).tolist()), *listed.others]:
            home = Home(self, Slot(pack, came.offset, came.length), 0)
            is_locked_one = self._sealing.is_locked(came.key_id)
            yield FoundPage(came.header, home, came.stored_ns, is_locked_one)

    def _make_packs(self) -> Packs:
        return Packs(
            self.path / "packs",
            self._files,
            self._space,
            pack_bytes=self._pack_bytes,
            block_bytes=self.block_bytes,
            secret=self._sealing.secret,
            sync=self._is_safe,
            on_error=lambda error: self._failed(self, error, "remove"),
        )

    def _lock(self, timeout_s: float) -> None:
        try:
            handle = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # Where nobody can make a lock, nobody can write either.
            handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            self.health.failed(error, "store", for_good=True)
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until_s:
                    time.sleep(_LOCK_POLL_S)
                    continue
                os.close(handle)
                raise FolderInUseError(
                    f"{self.path} is in use by another process: "
                    "every pool node needs a disk folder of its own"
                ) from None
            self._lock_handle = handle
            return

    def _read(self, header: PageHeader, home: Home) -> memoryview:
        try:
            if home.slot is None:
                return self._files.read(self._path(header))
            return memoryview(self.packs.read(home.slot))
        except NotAFileError as error:
            raise BadPage(BadPageReason.NOT_A_PAGE, str(error)) from error

    def _path(self, header: PageHeader) -> Path:
        return self.path / page_name(header.model_root, header.key, header.part)

    def _store_file(
        self, header: PageHeader, chunks: list[memoryview], claim: Claim
    ) -> Home | None:
        path = self._path(header)
        temp = self._temp / str(next(self._temp_names))
        self._directories.enter(path.parent)
        spent = 0
        is_stored = False
        try:
            size = self._files.write_new(temp, chunks, sync=self._is_safe)
            if claim.spend(size):
                spent = size
                self._put(temp, path)
                is_stored = claim.spend(self._directories.measure(path.parent))
        finally:
            if not is_stored:
                for leftover in (temp, path):
                    with contextlib.suppress(OSError):
                        self._files.unlink(leftover)
                with contextlib.suppress(OSError):
                    claim.spend(-spent - self._directories.leave(path.parent))
        if not is_stored:
            return None
        if self._syncer is not None:
            self._syncer.add([path], [path.parent])
        return Home(self, None, size)

    def _put(self, temp: Path, path: Path) -> None:
        """Give a whole file its name."""
        made = False
        for _ in range(_RENAMES):
            try:
                self._files.rename(temp, path)
                break
            except FileNotFoundError:
                # Not there yet, or removed when its last file left, this very moment.
                self._files.make_folder(path.parent)
                made = True
        else:
            self._files.rename(temp, path)
        if self._is_safe:
            self._files.sync(path.parent)
            if made:
                self._files.sync(path.parent.parent)
                self._files.sync(self.path)

    def _page_directories(self) -> Iterator[Path]:
        """List the directories that hold page files."""
        for root in sorted(self.path.iterdir()):
            if len(root.name) == 2 * KEY_BYTES and root.is_dir():
                yield from (path for path in sorted(root.iterdir()) if path.is_dir())

    def _scan_file(self, path: Path) -> FoundPage | None:
        name = parse_page_name(path.relative_to(self.path).as_posix())
        if name is None:
            return None
        try:
            stat = path.lstat()
            head = self._files.read_at(path, 0, HEAD_BYTES)
        except NotAFileError:
            self._found_bad(path, self._files.allocated_below(path), BadPageReason.NOT_A_PAGE)
            return None
        except OSError as error:
            self.health.failed(error, "load")
            return None
        size = stat.st_blocks * 512
        try:
            header, _, key_id = self._sealing.open_head(head, stat.st_size)
        except BadPage as error:
            self._found_bad(path, size, error.reason)
            return None
        if (header.model_root, header.key, header.part) != name:
            self._found_bad(path, size, BadPageReason.WRONG_PAGE)
            return None
        self._directories.enter(path.parent)
        self._space.found(size)
        is_locked = self._sealing.is_locked(key_id)
        return FoundPage(header, Home(self, None, size), stat.st_mtime_ns, is_locked)

    def _found_bad(self, path: Path, size: int, reason: BadPageReason) -> None:
        self.bad_pages[reason.value] += 1
        try:
            self._space.found(self._set_aside.take_file(path, reason))
            self._set_aside.trim()
        except OSError:
            self._space.found(size)

"""Packs: files that hold many small pages each.

Covers where in which pack a page lies, writing and reading it there, and what of a pack is dead.
Does not cover page files of their own (`pie.pool.folder`), or moving what is alive out of a pack
that is mostly dead (`pie.pool.compaction`).

A pack is `N.pack`, page files one after another, and `N.list`, what lies where
(`pie.pool.pack_index`). Both are only appended to. A page is in the pack once its record is in
the list, which is written after the page: bytes without a record are dead.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Buffer

from pie.page.header import PageHeader
from pie.page.key import PageKey
from pie.pool.files import Files, NotAFileError
from pie.pool.pack_index import (
    LEFT_BYTES,
    Came,
    Left,
    PackList,
    decode_list,
    decode_records,
    encode_record,
)
from pie.pool.space import Claim, Space

log = logging.getLogger("pie.pool.disk")

PACK_BYTES = 4 << 20
"""A pack of this size takes no more pages: half of it is copied in 2 ms when it is compacted."""

_LAST = 10**10 - 1
"""Names have ten digits."""
_NAME = re.compile(r"(?P<number>\d{10})\.(?P<kind>pack|list)")


@dataclass(slots=True, eq=False)
class Pack:
    """One pack, as far as it is known without looking at it."""

    number: int
    end: int = 0
    """Bytes handed out to pages, those being written included."""
    list_bytes: int = 0
    """Bytes of the list, with room for a `Left` for each page."""
    live_bytes: int = 0
    live_pages: int = 0
    """Pages in it and being written to it."""
    charged_bytes: int = 0
    is_deleted: bool = False

    @property
    def is_half_dead(self) -> bool:
        """Whether at least half of what was written is of no use any more."""
        return 2 * self.live_bytes <= self.end


@dataclass(slots=True)
class Slot:
    """Where in a pack a page lies."""

    pack: Pack
    offset: int
    length: int


class Packs:
    """The packs of one folder. Thread-safe; the lock is held for no I/O."""

    def __init__(
        self,
        path: Path,
        files: Files,
        space: Space,
        *,
        pack_bytes: int = PACK_BYTES,
        block_bytes: int = 4096,
        secret: bytes | None = None,
        sync: bool = False,
        on_error: Callable[[OSError], object] = lambda _: None,
    ) -> None:
        """Begin with no pack; `scan` finds those that are there.

        Args:
            path: The folder of the packs alone.
            files: Makes the system calls.
            space: What packs take is taken from it.
            pack_bytes: A pack of this size takes no more pages.
            block_bytes: In which unit the file system hands out bytes.
            secret: The cluster's secret, where it has one.
            sync: Whether each page is brought to the disk at once.
            on_error: Told what the disk refused, where that does not keep the call from its end.
        """
        self.path = path
        self._files = files
        self._space = space
        self._pack_bytes = pack_bytes
        self._block_bytes = block_bytes
        self._secret = secret
        self._sync = sync
        self._on_error = on_error
        self._open: Pack | None = None
        self._packs: dict[int, Pack] = {}
        self._last = 0
        """Number of the pack that was made last."""
        self._strays: set[int] = set()
        """Numbers of what has a pack's name and is none."""
        self._lock = threading.Lock()

    def paths(self, pack: Pack) -> tuple[Path, Path]:
        """Return where a pack and its list are."""
        name = f"{pack.number:010}"
        return self.path / f"{name}.pack", self.path / f"{name}.list"

    def store(
        self,
        header: PageHeader,
        chunks: Sequence[memoryview],
        claim: Claim,
        *,
        key_id: bytes | None = None,
    ) -> Slot | None:
        """Write a page file into the pack that is open; None where the claim is too small.

        Args:
            header: What the page's own header says.
            chunks: The page file.
            claim: Takes what the pack grows by.
            key_id: Which key the page is encrypted with.

        Raises:
            OSError: The disk did not take it; what was taken of the pack is dead.
        """
        length = sum(chunk.nbytes for chunk in chunks)
        with self._lock:
            pack = self._pack_for(length)
            slot = Slot(pack, pack.end, length)
            came = Came(slot.offset, length, time.time_ns(), header, key_id)
            record = encode_record(came, self._secret)
            list_bytes = pack.list_bytes + len(record) + LEFT_BYTES
            charge = self._blocks(pack.end + length) + self._blocks(list_bytes)
            if not claim.spend(charge - pack.charged_bytes):
                return None
            pack.charged_bytes = charge
            pack.end += length
            pack.list_bytes = list_bytes
            pack.live_bytes += length
            pack.live_pages += 1
        data, index = self.paths(pack)
        try:
            self._files.write_at(data, slot.offset, chunks, sync=self._sync)
            self._files.append(index, record, create=True, sync=self._sync)
            if self._sync and not slot.offset:
                self._files.sync(self.path)
        except OSError:
            with self._lock:
                self._free(slot)
                is_last = self._retire(pack)
                if self._open is pack:
                    self._open = None
            if is_last:
                with contextlib.suppress(OSError):
                    self._delete(pack)
            raise
        return slot

    def read(self, slot: Slot) -> bytes:
        """Return the page file in a slot.

        Raises:
            OSError: It cannot be read, or its pack is gone.
        """
        return self._files.read_at(self.paths(slot.pack)[0], slot.offset, slot.length)

    def remove(self, slot: Slot, key: PageKey) -> None:
        """Mark a page as dead, and delete its pack if it was the last one alive there.

        The page is gone in any case. A disk that does not take the mark brings it back at the next
        start, and one that does not let a pack go keeps its bytes taken; both are reported.
        """
        with self._lock:
            self._free(slot)
            is_last = self._retire(slot.pack)
        try:
            if is_last:
                self._delete(slot.pack)
            else:
                left = encode_record(Left(slot.offset, key), self._secret)
                with contextlib.suppress(FileNotFoundError):
                    self._files.append(self.paths(slot.pack)[1], left, create=False, sync=False)
        except OSError as error:
            self._on_error(error)

    def half_dead(self) -> Pack | None:
        """Return the pack that compaction frees most of, closing it; None where none is half dead."""
        with self._lock:
            worth = [pack for pack in self._packs.values() if pack.is_half_dead and pack.end]
            if not worth:
                return None
            pack = max(worth, key=lambda each: each.end - each.live_bytes)
            if pack is self._open:
                self._open = None
            return pack

    def delete_if_empty(self, pack: Pack) -> None:
        """Delete a pack in which nothing is alive, if it is not deleted yet.

        Raises:
            OSError: It cannot be deleted; its bytes stay taken.
        """
        with self._lock:
            is_last = self._retire(pack)
        if is_last:
            self._delete(pack)

    def pages(self, pack: Pack) -> list[Came]:
        """Return the pages that have come to a pack, those that left again included.

        Raises:
            OSError: Its list cannot be read.
        """
        data = self._read_whole(self.paths(pack)[1])
        return [record for record in self._records(data)[0] if isinstance(record, Came)]

    def scan(self) -> Iterator[tuple[Pack, PackList]]:
        """Take over the packs that an earlier process left, and return what is in each.

        One whose list is not whole has orphans or torn pages. What has a pack's name and is none goes, where
        the disk lets it go; that and whatever else lies there is counted as taken.

        Raises:
            OSError: The folder cannot be read.
        """
        numbers: set[int] = set()
        for path in self.path.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None:
                numbers.add(int(match["number"]))
            else:
                self._space.found(self._files.allocated_below(path))
        self._last = max(numbers, default=0)
        for number in sorted(numbers):
            pack = Pack(number)
            yield pack, self._scan_pack(pack)

    def check(self) -> None:
        """Assert that the tables agree with each other."""
        with self._lock:
            for pack in self._packs.values():
                assert 0 <= pack.live_bytes <= pack.end
                assert (pack.live_pages == 0) == (pack.live_bytes == 0)
                assert pack.charged_bytes == self._blocks(pack.end) + self._blocks(pack.list_bytes)
                assert pack.live_pages or not pack.is_deleted

    @property
    def live_pages(self) -> int:
        """Pages in packs, those being written included."""
        with self._lock:
            return sum(pack.live_pages for pack in self._packs.values())

    def _pack_for(self, length: int) -> Pack:
        """Return the pack that takes the next page; the caller holds the lock."""
        pack = self._open
        if pack is None or (pack.end and pack.end + length > self._pack_bytes):
            pack = self._open = Pack(self._new_number())
            self._packs[pack.number] = pack
        return pack

    def _new_number(self) -> int:
        """Return a number that no other pack has."""
        while True:
            self._last = self._last % _LAST + 1
            if self._last not in self._packs and self._last not in self._strays:
                return self._last

    def _free(self, slot: Slot) -> None:
        slot.pack.live_bytes -= slot.length
        slot.pack.live_pages -= 1

    def _retire(self, pack: Pack) -> bool:
        """Take a pack that holds nothing out of use; say whether it is to be deleted."""
        if pack.live_pages or pack.is_deleted:
            return False
        pack.is_deleted = True
        if self._open is pack:
            self._open = None
        return True

    def _delete(self, pack: Pack) -> None:
        try:
            # A list without its pack is an orphan, and so is the reverse.
            for path in self.paths(pack):
                self._files.unlink(path)
        except OSError:
            pack.is_deleted = False
            raise
        with self._lock:
            del self._packs[pack.number]
        self._space.give(pack.charged_bytes)

    def _scan_pack(self, pack: Pack) -> PackList:
        data, index = self.paths(pack)
        try:
            size = self._files.size(data)
            listed = decode_list(self._read_whole(index), self._secret)
        except FileNotFoundError:
            size, listed = 0, decode_list(b"")._replace(is_whole=False)
        except NotAFileError as error:
            log.warning("a pack is left out: %s", error)
            self._found_stray(pack)
            return decode_list(b"")._replace(is_whole=False)
        listed = listed.within(size)
        pages = len(listed.columns) + len(listed.others)
        if not pages:
            with contextlib.suppress(OSError):  # On a disk that is read-only it stays as it is.
                self._files.unlink(data)
                self._files.unlink(index)
            self._found_stray(pack)
            return listed
        # What lies behind the last page was being written when the process ended.
        pack.end = listed.end
        if pack.end < size:
            with contextlib.suppress(OSError):
                self._files.truncate(data, pack.end)
        pack.list_bytes = index.stat().st_size + LEFT_BYTES * pages
        pack.live_bytes = listed.page_bytes
        pack.live_pages = pages
        pack.charged_bytes = self._blocks(pack.end) + self._blocks(pack.list_bytes)
        self._space.found(pack.charged_bytes)
        self._packs[pack.number] = pack
        if listed.is_whole and pack.end < self._pack_bytes:
            self._open = pack
        return listed

    def _found_stray(self, pack: Pack) -> None:
        """Count what has the name of a pack and is none, as far as it is there."""
        self._strays.add(pack.number)
        self._space.found(sum(map(self._files.allocated_below, self.paths(pack))))

    def _records(self, data: Buffer) -> tuple[list[Came | Left], bool]:
        return decode_records(bytes(data), self._secret)

    def _read_whole(self, path: Path) -> bytes:
        return self._files.read_at(path, 0, self._files.size(path))

    def _blocks(self, size: int) -> int:
        return -(-size // self._block_bytes) * self._block_bytes

"""Moving what is alive out of packs that are mostly dead.

Covers one step: one pack is emptied and deleted. Does not cover when that is due
(`pie.pool.disk`) or what a pack is (`pie.pool.packs`).

A page is written to the pack that is open before it leaves the old one, so a process that ends
in between leaves two copies, of which the next start keeps the later one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from pie.pool.disk_table import DiskTable
from pie.pool.folder import FRAME_BYTES, Folder, Home
from pie.pool.pack_index import Came
from pie.pool.packs import Pack
from pie.pool.space import Space
from pie.pool.tier import id_of


class Compaction:
    """Empties packs of a tier's folders, one at a time."""

    def __init__(
        self,
        folders: Sequence[Folder],
        space: Space,
        table: DiskTable,
        lock: threading.Lock,
        failed: Callable[[Folder, OSError, str], None],
    ) -> None:
        """Work on a tier's own tables.

        Args:
            folders: Where packs are.
            space: What bytes are taken from.
            table: The tier's pages.
            lock: Guards the table.
            failed: Told what a disk refused to do.
        """
        self._folders = folders
        self._space = space
        self._table = table
        self._lock = lock
        self._failed = failed
        self._running = threading.Lock()

    def step(self) -> bool:
        """Empty the pack that has most to give, and say whether that freed bytes.

        Does nothing while another thread is at it.
        """
        if not self._running.acquire(blocking=False):
            return False
        try:
            for folder in self._folders:
                if folder.health.takes_stores:
                    pack = folder.packs.half_dead()
                    if pack is not None and self._empty(folder, pack):
                        return True
            return False
        finally:
            self._running.release()

    def _empty(self, folder: Folder, pack: Pack) -> bool:
        before = self._space.used_bytes
        try:
            for came in folder.packs.pages(pack) if pack.live_pages else ():
                self._move(folder, pack, came)
            folder.packs.delete_if_empty(pack)
        except OSError as error:
            self._failed(folder, error, "store")
            return False
        return pack.is_deleted and self._space.used_bytes < before

    def _move(self, folder: Folder, pack: Pack, came: Came) -> None:
        """Move a page to the pack that is open, if it is still where it was."""
        page = id_of(came.header)
        with self._lock:
            entry = self._table.look(page)
        home = None if entry is None else entry.home
        slot = None if home is None else home.slot
        if (
            entry is None
            or home is None
            or slot is None
            or not (entry.is_readable or entry.is_locked)
        ):
            return
        if slot.pack is not pack or slot.offset != came.offset:
            return
        # Damage goes along, and is found at the next load as it would have been here.
        data = folder.packs.read(slot)
        size = len(data) + FRAME_BYTES + 2 * folder.block_bytes
        claim = self._space.claim(size, may_use_last=True)
        if claim is None:
            return
        try:
            new = folder.packs.store(entry.header, [memoryview(data)], claim, key_id=came.key_id)
        finally:
            claim.close()
        if new is None:
            return
        with self._lock:
            is_same = self._table.move(page, home, Home(folder, new, 0))
        folder.packs.remove(slot if is_same else new, page.key)

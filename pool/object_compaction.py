"""Moving what is alive out of packs in a bucket that are mostly dead.

Covers one pack: what is alive is sent as a new pack, and the old one goes. Does not cover when that
is due (`pie.pool.object`).

The new pack is in the bucket before the old one leaves it, so a node that ends in between leaves two
copies, of which the next start keeps one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from pie.page.lookup import LookupStatus
from pie.pool.object_entry import ObjectEntry, ObjectHome, ObjectPack
from pie.pool.object_errors import ObjectStoreError
from pie.pool.object_names import tail_bytes
from pie.pool.object_pages import ObjectPages, SealedPage
from pie.pool.object_store import ObjectStore
from pie.pool.object_writer import ObjectWriter
from pie.pool.space import Space
from pie.pool.tier import PageId


class Table(Protocol):
    """What is asked and told of pages that move."""

    @property
    def entries(self) -> Mapping[PageId, ObjectEntry]:
        """Where pages lie."""
        ...

    def moved(self, entry: ObjectEntry, old: ObjectHome, new: ObjectHome) -> None:
        """Take in that a page lies in another pack now."""


class ObjectCompaction:
    """Empties packs of one tier, beside those who use it."""

    def __init__(
        self,
        store: ObjectStore,
        pages: ObjectPages,
        space: Space,
        writer: ObjectWriter,
        table: Table,
        failed: Callable[[ObjectStoreError, str], None],
    ) -> None:
        """Work on a tier's own tables.

        Args:
            store: Where packs are.
            pages: Reads and makes packs.
            space: What bytes are taken from.
            writer: Sends the new pack, on its threads.
            table: Told of each page where it was and where it lies now.
            failed: Told what the store refused to do.
        """
        self._store = store
        self._pages = pages
        self._space = space
        self._writer = writer
        self._table = table
        self._failed = failed

    def start(self, pack: ObjectPack) -> None:
        """Empty a pack soon, unless that is under way already."""
        if not pack.is_moving:
            pack.is_moving = True
            self._writer.start(lambda: self._empty(pack))

    def _empty(self, pack: ObjectPack) -> None:
        try:
            self._move_all(pack)
        except ObjectStoreError as error:
            self._failed(error, "store")
        finally:
            # What is left of it may be tried again when another page of it has left.
            pack.is_moving = False

    def _move_all(self, pack: ObjectPack) -> None:
        data = None if pack.is_leaving else self._store.get(pack.name)
        if data is None:
            return
        tail = data[len(data) - (tail_bytes(pack.name) or 0) :]
        files: list[SealedPage] = []
        entries: list[ObjectEntry] = []
        homes: list[ObjectHome] = []
        for came in self._pages.read_list(tail)[0]:
            entry = self._table.entries.get(PageId(came.header.key, came.header.part))
            home = None if entry is None else entry.home
            if entry is None or home is None or entry.status is not LookupStatus.HIT:
                continue
            if home.pack is pack and home.start == came.offset:
                # Damage goes along, and is found at the next load as it would have been here.
                files.append(
                    SealedPage(
                        entry.header, data[home.start : home.start + home.length], came.key_id
                    )
                )
                entries.append(entry)
                homes.append(home)
        claim = self._space.claim(pack.live_bytes + len(tail)) if files else None
        if claim is None:
            return
        try:
            new, new_homes = self._writer.send_pack(files)
            claim.spend(new.size)
        finally:
            claim.close()
        for entry, old_home, new_home in zip(entries, homes, new_homes, strict=True):
            self._table.moved(entry, old_home, new_home)

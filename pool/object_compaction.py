"""Moving what is alive out of packs in a bucket that are mostly dead.

Covers one pack: what is alive is sent as a new pack, and the old one goes. Does not cover when that
is due (`pie.pool.object`).

The new pack is in the bucket before the old one leaves it, so a node that ends in between leaves two
copies, of which one goes later, as where two nodes had packed the same pages.
"""

from __future__ import annotations

from collections.abc import Callable

from pie.pool.object_entry import ObjectPack
from pie.pool.object_errors import ObjectStoreError
from pie.pool.object_names import tail_bytes
from pie.pool.object_pages import ObjectPages, SealedPage
from pie.pool.object_store import ObjectStore
from pie.pool.object_table import ObjectTable, Placed
from pie.pool.object_writer import ObjectWriter
from pie.pool.space import Space
from pie.pool.tier import PageId, id_of


class ObjectCompaction:
    """Empties packs of one tier, beside those who use it."""

    def __init__(
        self,
        store: ObjectStore,
        pages: ObjectPages,
        space: Space,
        writer: ObjectWriter,
        table: ObjectTable,
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
        came = {
            (PageId(one.header.key, one.header.part), one.offset): one
            for one in self._pages.read_list(tail).came
        }
        alive = self._table.alive_in(pack, came)
        files = []
        for entry, home in alive:
            one = came[id_of(entry.header), home.start]
            # Damage goes along, and is found at the next load as it would have been here.
            file = data[one.offset : one.offset + one.length]
            files.append(SealedPage(one.header, file, one.key_id))
        size = sum(len(file.data) for file in files) + len(tail)
        claim = self._space.claim(size) if files else None
        if claim is None:
            return
        try:
            with self._writer.pack_sent(files, before=pack) as (new, homes):
                claim.spend(new.size)
                placed = [
                    Placed(entry, home) for (entry, _), home in zip(alive, homes, strict=True)
                ]
                self._table.moved(pack, new, placed)
        finally:
            claim.close()

"""How the object tier makes the bytes of pages, packs and lists, and reads them.

Covers packs of page files with the list at the end, and lists. Does not cover how a payload becomes
a page file (`pie.pool.sealing`) or where objects lie (`pie.pool.object_names`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from typing_extensions import Buffer

from pie.page.errors import BadPage, BadPageReason
from pie.page.format import FileHeader
from pie.page.header import PageHeader
from pie.pool.object_store import ObjectStart
from pie.pool.pack_index import Came, Left, Record, decode_records, encode_record
from pie.pool.sealing import Sealing
from pie.pool.tier import StoredPage


class SealedPage(NamedTuple):
    """A page file, and what its pack's list says of it."""

    header: PageHeader
    data: bytes
    key_id: bytes | None
    """Which key it is encrypted with; None where it is not."""


class PackBytes(NamedTuple):
    """A pack, ready to be sent."""

    data: bytes
    lengths: list[int]
    """Of each page file, in the order in which they lie one after another."""
    tail_bytes: int
    """Of the list at the end."""


class ObjectList(NamedTuple):
    """What a list says."""

    came: list[Came]
    left: list[Left]
    is_whole: bool
    """Whether nothing else is in it."""


class ObjectPages:
    """Makes and reads what is kept in a bucket. Thread-safe."""

    def __init__(self, sealing: Sealing) -> None:
        """Pack and encrypt as `sealing` does, and key lists with its secret."""
        self._sealing = sealing
        self._secret = sealing.secret
        self.key_id: bytes | None = None
        """Which key the latest page was encrypted with."""

    def seal(self, header: PageHeader, payload: Buffer) -> SealedPage:
        """Return the page file of a raw payload."""
        sealed = self._sealing.seal(header, payload)
        self.key_id = sealed.key_id
        return SealedPage(header, b"".join(sealed.chunks), sealed.key_id)

    def open(self, data: Buffer, header: PageHeader) -> StoredPage:
        """Return a page's payload, checked, with the header that it was written with.

        Raises:
            BadPage: It is another page than `header` names, or is `LOCKED`.
        """
        found, payload = self._sealing.open(data, key=header.key, part=header.part)
        if not _is_same_page(found, header):
            raise BadPage(BadPageReason.WRONG_PAGE, f"its header is {found}")
        return StoredPage(found, payload)

    def header_of(self, start: ObjectStart, header: PageHeader) -> tuple[PageHeader, int] | None:
        """Return header and size of another node's page file; None where it isn't that page, or is locked."""
        found = self._head_of(start, header)
        if found is None or self.is_locked(found.key_id):
            return None
        return found.header, start.object_bytes

    def is_locked_page(self, start: ObjectStart, header: PageHeader) -> bool:
        """Say whether an object is that page of this cluster, encrypted with a key that is not here."""
        found = self._head_of(start, header)
        return found is not None and self.is_locked(found.key_id)

    def _head_of(self, start: ObjectStart, header: PageHeader) -> FileHeader | None:
        try:
            found = self.open_head(start.data, start.object_bytes)
        except BadPage:
            return None
        return found if _is_same_page(found.header, header) else None

    def open_head(self, head: Buffer, file_bytes: int) -> FileHeader:
        """Return what a page file says of itself, from its first bytes.

        Raises:
            BadPage: It does not begin like a page.
        """
        return self._sealing.open_head(head, file_bytes)

    def is_locked(self, key_id: bytes | None) -> bool:
        """Say whether a page that was found is encrypted with a key that is not here."""
        return self._sealing.is_locked(key_id)

    def pack(self, files: Sequence[SealedPage], stored_ns: int) -> PackBytes:
        """Return a pack of page files."""
        came = []
        at = 0
        for file in files:
            came.append(Came(at, len(file.data), stored_ns, file.header, file.key_id))
            at += len(file.data)
        tail = self.listed(came)
        data = b"".join([*(file.data for file in files), tail])
        return PackBytes(data, [len(file.data) for file in files], len(tail))

    def listed(self, records: Sequence[Record]) -> bytes:
        """Return a list of pages that are there, or have left packs."""
        return b"".join(encode_record(record, self._secret) for record in records)

    def read_list(self, data: bytes) -> ObjectList:
        """Return what a list says."""
        records, is_whole = decode_records(data, self._secret)
        came = [record for record in records if isinstance(record, Came)]
        left = [record for record in records if isinstance(record, Left)]
        return ObjectList(came, left, is_whole)


def _is_same_page(found: PageHeader, wanted: PageHeader) -> bool:
    """Say whether two headers are of one page, as two workers may have computed it.

    Arithmetic in bfloat16 depends on what is computed beside it, so bits and checksum may differ;
    a file's own checksum, keyed with the cluster's secret, says whether its bits are those that were
    written. Whether it had been in a pool, and so has a group, may differ too.
    """
    same = msgspec.structs.replace(found, checksum=wanted.checksum, group=wanted.group)
    return same == wanted

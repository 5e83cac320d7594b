"""Pages at rest in few bytes: what their headers say and where they lie, a row each.

Covers rows of pages that nobody reads or writes just now. Does not cover pages on their way in or out
(`pie.pool.disk_table`), or where "where" is: the disk tier and the bucket each have their own.

A row takes about 108 bytes with its key. What many pages have in common (model, layout, tenant, pack) is there
once and counted. The page before a page, and the first one of its group, have rows too, held or not.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from pie.page.columns import PageColumns
from pie.page.events import Part
from pie.page.header import CHECKSUM_BYTES, PageHeader
from pie.page.key_table import NO_ROW, KeyTable, Row, Rows
from pie.pool.numbered import Numbered
from pie.pool.pack_index import CameColumns, Shared, shared_of
from pie.pool.tier import PageId

Where = TypeVar("Where", bound=Hashable)

_PARTS = tuple(Part)
_NOT_HELD = -2


class Place(NamedTuple, Generic[Where]):
    """Where a page lies: in what, and two numbers of 32 bits whose meaning is the tier's."""

    where: Where
    start: int
    length: int


class RestRows(Generic[Where]):
    """A table of pages at rest. Not thread-safe."""

    def __init__(self) -> None:
        self._table = KeyTable()
        self._refs = array("i")
        """1 for a page that is here, and 1 for each page that has it for its parent or first of its group."""
        self._parents = array("i")
        self._groups = array("i")
        self._checksums = bytearray()
        self._indexes = array("i")
        self._sizes = array("I")
        self._shared_of = array("i")
        self._where_of = array("i")
        self._starts = array("I")
        self._lengths = array("I")
        self._stamps = array("q")
        self._shared = Numbered[Shared]()
        self._wheres = Numbered[Where]()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, page: PageId) -> Row:
        """Return the row of a page that is here, or `NO_ROW`."""
        row = self._table.find(page.key, page.part)
        return NO_ROW if row >= 0 and self._parents[row] == _NOT_HELD else row

    def page(self, row: Row) -> PageId:
        """Return the name of a row's page."""
        return PageId(self._table.key(row), _PARTS[self._table.parts[row]])

    def header(self, row: Row) -> PageHeader:
        """Return the header of a row's page."""
        table, shared = self._table, self._shared[self._shared_of[row]]
        group = self._groups[row]
        at = row * CHECKSUM_BYTES
        return shared.header(
            key=table.key(row),
            parent=table.key(self._parents[row]),
            index=self._indexes[row],
            part=_PARTS[table.parts[row]],
            raw_bytes=self._sizes[row],
            checksum=bytes(self._checksums[at : at + CHECKSUM_BYTES]),
            group=table.key(group) if group >= 0 else b"",
        )

    def place(self, row: Row) -> Place[Where]:
        """Return where a row's page lies."""
        where = self._wheres[self._where_of[row]]
        return Place(where, self._starts[row], self._lengths[row])

    def stamp(self, row: Row) -> int:
        """Return the number by which rows are in order."""
        return self._stamps[row]

    def stamps(self, rows: Rows) -> npt.NDArray[np.int64]:
        """Return the stamps of rows."""
        return np.array(self._stamps, np.int64)[rows]

    def holds(self, row: Row, stamp: int) -> bool:
        """Say whether a row's page is the one of that stamp still."""
        return self._parents[row] != _NOT_HELD and self._stamps[row] == stamp

    def add(self, header: PageHeader, place: Place[Where], stamp: int) -> Row:
        """Give a page that is not here, and fits in columns (`pie.pool.pack_index`), a row."""
        part = int(header.part)
        row = self._table.find_or_add(header.key, part)
        parent = self._table.find_or_add(header.parent, part)
        group = self._table.find_or_add(header.group, part) if header.group else NO_ROW
        self._grow()
        self._parents[row] = parent
        self._groups[row] = group
        for each in (row, parent, group):
            if each >= 0:
                self._refs[each] += 1
        at = row * CHECKSUM_BYTES
        self._checksums[at : at + CHECKSUM_BYTES] = header.checksum
        self._indexes[row] = header.index
        self._sizes[row] = header.raw_bytes
        self._shared_of[row] = self._shared.take(shared_of(header))
        self._where_of[row] = self._wheres.take(place.where)
        self._starts[row], self._lengths[row] = place.start, place.length
        self._stamps[row] = stamp
        self._count += 1
        return row

    def add_all(self, came: CameColumns, where: Callable[[int], Where]) -> npt.NDArray[np.intp]:
        """Give pages rows, and return the lines of those that are here already, or twice among them.

        Args:
            came: What lists say of pages.
            where: Returns what `came.pack_of` means.
        """
        records = came.records
        parts = np.ascontiguousarray(records["part"])
        rows = self._table.find_or_add_all(records["key"], parts)
        self._grow()
        is_new = np.frombuffer(self._parents, np.int32)[rows] == _NOT_HELD
        first = np.unique(rows, return_index=True)[1]
        is_first = np.zeros(len(rows), bool)
        is_first[first] = True
        new = np.flatnonzero(is_new & is_first)
        self._set(came, new, rows[new], where)
        return np.flatnonzero(~(is_new & is_first))

    def move(self, row: Row, place: Place[Where]) -> None:
        """Say that a row's page lies elsewhere now."""
        before = self._where_of[row]
        self._where_of[row] = self._wheres.take(place.where)
        self._wheres.give(before)
        self._starts[row], self._lengths[row] = place.start, place.length

    def remove(self, row: Row) -> None:
        """Take a page's row away."""
        parent, group = self._parents[row], self._groups[row]
        self._parents[row] = _NOT_HELD
        self._shared.give(self._shared_of[row])
        self._wheres.give(self._where_of[row])
        self._count -= 1
        for each in (row, parent, group):
            if each >= 0:
                self._refs[each] -= 1
                if not self._refs[each]:
                    self._table.remove(each)

    def rows(self) -> Rows:
        """Return all rows, by stamp."""
        held = self._held()
        return held[np.argsort(self.stamps(held), kind="stable")]

    def rows_in(self, is_meant: Callable[[Where], bool]) -> list[Row]:
        """Return the rows of pages that lie somewhere."""
        numbers = [number for number, where in self._wheres if is_meant(where)]
        held = self._held()
        return held[np.isin(np.array(self._where_of, np.int32)[held], numbers)].tolist()  # type: ignore[no-any-return]

    def columns(self) -> PageColumns:
        """Return all pages, by stamp."""
        rows = self.rows()
        tags = {number: shared.tenant_tag for number, shared in self._shared}
        names = sorted(set(tags.values()))
        tag_of = np.zeros(max(tags, default=0) + 1, np.int32)
        for number, tag in tags.items():
            tag_of[number] = names.index(tag)
        return PageColumns(
            keys=self._table.keys(rows),
            parts=np.array(self._table.parts, np.uint8)[rows],
            parents=self._table.keys(np.array(self._parents, np.int32)[rows]),
            indexes=np.array(self._indexes, np.int32)[rows],
            sizes=np.array(self._sizes, np.uint32)[rows].astype(np.int64),
            tags=tag_of[np.array(self._shared_of, np.int32)[rows]],
            tenant_tags=names,
        )

    def headers(self) -> Iterator[PageHeader]:
        """List the headers of all pages, by stamp."""
        return (self.header(row) for row in self.rows().tolist())

    def check(self) -> None:
        """Assert that the rows agree with each other; slow, for tests."""
        self._table.check()
        refs = [0] * self._table.capacity
        held = self._held().tolist()
        for row in held:
            for each in (row, self._parents[row], self._groups[row]):
                if each >= 0:
                    refs[each] += 1
        assert refs == list(self._refs)
        assert len(held) == self._count
        assert sum(map(bool, refs)) == len(self._table)
        self._shared.check(self._count)
        self._wheres.check(self._count)

    def _held(self) -> Rows:
        return np.flatnonzero(np.array(self._parents, np.int32) != _NOT_HELD).astype(np.int32)

    def _set(
        self,
        came: CameColumns,
        lines: npt.NDArray[np.intp],
        rows: Rows,
        where: Callable[[int], Where],
    ) -> None:
        records = came.records[lines]
        parts = np.ascontiguousarray(records["part"])
        parents = self._table.find_or_add_all(records["parent"], parts)
        groups = np.full(len(rows), NO_ROW, np.int32)
        grouped = np.flatnonzero(records["has_group"])
        firsts = _first_lines(records["group"][grouped], parts[grouped])
        heads = grouped[firsts]
        of_heads = self._table.find_or_add_all(records["group"][heads], parts[heads])
        groups[grouped] = of_heads[np.cumsum(firsts) - 1]
        self._grow()
        refs = np.frombuffer(self._refs, np.int32)
        refs[rows] += 1
        np.add.at(refs, parents, 1)
        np.add.at(refs, groups[grouped], 1)
        del refs
        np.frombuffer(self._checksums, np.uint8).reshape(-1, CHECKSUM_BYTES)[rows] = records[
            "checksum"
        ]
        shared = self._shared.take_all(came.shared, came.shared_of[lines])
        packs = came.pack_of[lines]
        wheres = self._wheres.take_all([where(n) for n in range(packs.max(initial=-1) + 1)], packs)
        for column, dtype, values in (
            (self._parents, np.int32, parents),
            (self._groups, np.int32, groups),
            (self._indexes, np.int32, records["index"]),
            (self._sizes, np.uint32, records["raw_bytes"]),
            (self._shared_of, np.int32, shared),
            (self._where_of, np.int32, wheres),
            (self._starts, np.uint32, records["offset"]),
            (self._lengths, np.uint32, records["length"]),
            (self._stamps, np.int64, records["stored_ns"]),
        ):
            np.frombuffer(column, dtype)[rows] = values
        self._count += len(rows)

    def _grow(self) -> None:
        """Make the columns as long as the table is."""
        missing = self._table.capacity - len(self._refs)
        if missing <= 0:
            return
        self._parents.extend(array("i", [_NOT_HELD]) * missing)
        self._checksums += bytes(CHECKSUM_BYTES * missing)
        for column in (
            *(self._refs, self._groups, self._indexes, self._shared_of, self._where_of),
            *(self._sizes, self._starts, self._lengths, self._stamps),
        ):
            column.frombytes(bytes(column.itemsize * missing))


def _first_lines(
    keys: npt.NDArray[np.uint8], parts: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    """Say which lines differ from the one before."""
    firsts = np.ones(len(keys), bool)
    firsts[1:] = (keys[1:] != keys[:-1]).any(axis=1) | (parts[1:] != parts[:-1])
    return firsts

"""A page's bytes in and out of device memory, with what names them.

Covers headers of pages that leave, and whether a page that comes is one of this model's. Does not
cover where bytes lie (`pie.worker.arena`) or where they go (`pie.worker.offload`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pie.page.events import Part
from pie.page.header import PageHeader
from pie.page.key import RootKey
from pie.page.layout import PageLayout
from pie.pool.checksum import Checksum
from pie.pool.tier import PageId, StoredPage
from pie.worker.batch import PageSlot
from pie.worker.page_table import FrozenPage


class PageMemory(Protocol):
    """What is needed of `pie.worker.arena.Arena`."""

    def export(self, page_id: PageSlot, part: Part) -> memoryview:
        """Return a copy of a page's part."""
        ...

    def load(self, page_id: PageSlot, part: Part, payload: memoryview) -> None:
        """Write a page's part."""
        ...


@dataclass(frozen=True, slots=True)
class PageNames:
    """What all pages of one worker have in common."""

    model_root: RootKey
    layout: PageLayout


class Piece(NamedTuple):
    """A part of a page, and where it goes."""

    page: PageId
    slot: PageSlot


CopiedPart = tuple[PageHeader, memoryview]


class PageCopies:
    """Copies pages of one memory. Safe from any thread; who calls it holds a pin on the page."""

    def __init__(
        self, memory: PageMemory, names: PageNames, *, secret: bytes | None = None
    ) -> None:
        self._memory = memory
        self._checksum = Checksum(secret)
        self.names = names

    def copy(self, slot: PageSlot, page: FrozenPage, parts: Sequence[Part]) -> list[CopiedPart]:
        """Return a copy of those parts of a frozen page that lie in `slot`."""
        layout = self.names.layout
        copied: list[CopiedPart] = []
        for part in parts:
            payload = self._memory.export(slot, part)
            header = PageHeader(
                key=page.key,
                parent=page.parent,
                index=page.index,
                part=part,
                model_root=self.names.model_root,
                dtype=layout.dtype,
                layout_id=layout.layout_id,
                page_tokens=layout.page_tokens,
                raw_bytes=payload.nbytes,
                checksum=self._checksum.digest(payload),
                tenant_tag=page.tenant_tag,
                session_tag=page.session_tag,
            )
            copied.append((header, payload))
        return copied

    def write(self, slot: PageSlot, parts: Sequence[StoredPage]) -> None:
        """Write parts of a page.

        Raises:
            ValueError: A payload has another size than the layout says.
        """
        for part in parts:
            self._memory.load(slot, part.header.part, part.payload)

    def fits(self, part: StoredPage) -> bool:
        """Say whether a payload is one of this model's: keys say so, sizes are checked all the same."""
        header, layout = part.header, self.names.layout
        return (
            header.model_root == self.names.model_root
            and header.layout_id == layout.layout_id
            and part.payload.nbytes == layout.part_bytes(header.part)
        )

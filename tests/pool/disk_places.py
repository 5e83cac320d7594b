"""Helpers of the disk tier's tests."""

import os
from pathlib import Path

from pie.page.header import PageHeader
from pie.pool.conformance import put, sample_page
from pie.pool.disk import DiskTier
from pie.pool.tier import PageId, id_of

LARGE = 100_000
SMALL = 5_000


def where(tier: DiskTier, page: PageId) -> tuple[Path, int, int]:
    """Return the file that a page lies in, and from where to where in it."""
    entry = tier._table.look(page)
    assert entry is not None
    home = entry.home
    assert home is not None
    if home.slot is None:
        path = home.folder._path(entry.header)
        return path, 0, path.stat().st_size
    slot = home.slot
    return home.folder.packs.paths(slot.pack)[0], slot.offset, slot.offset + slot.length


def flip(path: Path, offset: int) -> None:
    """Change a bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def disk_usage(folder: Path) -> int:
    """Return what `du` says of a folder."""
    total = folder.lstat().st_blocks
    for top, folders, files in os.walk(folder):
        total += sum((Path(top) / name).lstat().st_blocks for name in (*folders, *files))
    return total * 512


def fill(tier: DiskTier, count: int, size: int, first: int = 0) -> list[PageHeader]:
    """Store pages of one size until `count` are in or one finds no room."""
    stored = []
    for number in range(first, first + count):
        header, payload = sample_page(number, size)
        if not put(tier, header, payload):
            break
        stored.append(header)
    return stored


def files_below(folder: Path) -> list[Path]:
    """Return the files in a folder besides its lock."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def pages_of(tier: DiskTier) -> set[PageId]:
    """Return the pages that a tier lists."""
    return {id_of(header) for header in tier.pages()}

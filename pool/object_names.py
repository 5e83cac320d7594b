"""Names in a bucket: pages, packs of small pages, and lists of what the pages are.

Covers making and reading names below a tier's prefix. Does not cover what the objects hold
(`pie.pool.object_pages`, `pie.pool.object_lists`).

    <model root>/<kk>/<key>.<part>     a page file
    packs/<time>-<chance>-<tail>.pack  small pages, many to an object; its last `tail` bytes say which
    lists/<time>-<chance>.list         headers of page files, so that a start need not read each
"""

from __future__ import annotations

import re

from pie.page.format import parse_page_name

PACKS = "packs/"
LISTS = "lists/"

_PACK = re.compile(r"packs/(?P<time>[0-9]{20})-[0-9a-f]{16}-(?P<tail>[0-9]{1,10})\.pack")
_LIST = re.compile(r"lists/[0-9]{20}-[0-9a-f]{16}\.list")


def pack_name(stored_ns: int, chance: bytes, tail_bytes: int) -> str:
    """Return the name of a new pack.

    Args:
        stored_ns: Wall-clock time, so that names sort by age; before 1970 counts as then.
        chance: 8 random bytes, so that no two nodes choose the same.
        tail_bytes: Size of the list at its end.
    """
    return f"{PACKS}{max(0, stored_ns):020}-{chance.hex()}-{tail_bytes}.pack"


def earlier_pack_name(name: str, chance: bytes, tail_bytes: int) -> str:
    """Return the name of a pack that takes the place of another, and that sorts before it.

    Args:
        name: Of the one that goes.
        chance: As `pack_name`'s.
        tail_bytes: As `pack_name`'s.
    """
    match = _PACK.fullmatch(name)
    assert match is not None
    return pack_name(max(0, int(match["time"]) - 1), chance, tail_bytes)


def list_name(stored_ns: int, chance: bytes) -> str:
    """Return the name of a new list; arguments as `pack_name`'s."""
    return f"{LISTS}{max(0, stored_ns):020}-{chance.hex()}.list"


def tail_bytes(name: str) -> int | None:
    """Return the size of the list at a pack's end; None where this is not the name of a pack."""
    match = _PACK.fullmatch(name)
    return None if match is None else int(match["tail"])


def prefix_of(name: str) -> str | None:
    """Return what stands before the name of a page or a pack; None where it is neither."""
    steps = name.split("/")
    for at in range(len(steps)):
        rest = "/".join(steps[at:])
        if tail_bytes(rest) is not None or parse_page_name(rest) is not None:
            return "/".join(steps[:at])
    return None


def is_list(name: str) -> bool:
    """Say whether this is the name of a list."""
    return _LIST.fullmatch(name) is not None

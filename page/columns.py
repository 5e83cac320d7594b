"""Many pages at once, as columns.

Covers what is said of a million pages where an object for each would cost seconds and hundreds of megabytes: by a
tier that has found them, and to the index. Does not cover where the columns come from (`pie.pool.rest_rows`) or go
(`pie.policies.page_rows`, `pie.index.publisher`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pie.page.events import PageEntry, Part, Tier, entry_masks, part_bit
from pie.page.key import KEY_BYTES, PageKey
from pie.page.key_table import Keys, as_keys


class PageColumns(NamedTuple):
    """Parts of pages, one in a line."""

    keys: Keys
    parts: npt.NDArray[np.uint8]
    parents: Keys
    indexes: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    """Bytes of payloads."""
    tags: npt.NDArray[np.int32]
    """Which of `tenant_tags` is each page's."""
    tenant_tags: Sequence[str]

    def take(self, lines: npt.NDArray[np.intp] | slice) -> PageColumns:
        """Return some lines."""
        return PageColumns(
            keys=self.keys[lines],
            parts=self.parts[lines],
            parents=self.parents[lines],
            indexes=self.indexes[lines],
            sizes=self.sizes[lines],
            tags=self.tags[lines],
            tenant_tags=self.tenant_tags,
        )


def concatenated(first: PageColumns, then: PageColumns) -> PageColumns:
    """Return the lines of both."""
    return PageColumns(
        keys=np.concatenate([first.keys, then.keys]),
        parts=np.concatenate([first.parts, then.parts]),
        parents=np.concatenate([first.parents, then.parents]),
        indexes=np.concatenate([first.indexes, then.indexes]),
        sizes=np.concatenate([first.sizes, then.sizes]),
        tags=np.concatenate([first.tags, then.tags + len(first.tenant_tags)]).astype(np.int32),
        tenant_tags=[*first.tenant_tags, *then.tenant_tags],
    )


class PageMasks(NamedTuple):
    """Which parts a place holds of pages in which tiers: each page once."""

    keys: Keys
    masks: npt.NDArray[np.uint32]


NO_MASKS = PageMasks(np.empty((0, KEY_BYTES), np.uint8), np.empty(0, np.uint32))


def masks_of(entries: Iterable[PageEntry]) -> PageMasks:
    """Return what entries say together."""
    masks: dict[PageKey, int] = {}
    for key, mask in entry_masks(entries):
        masks[key] = masks.get(key, 0) | mask
    return PageMasks(as_keys(list(masks)), np.fromiter(masks.values(), np.uint32, len(masks)))


def tier_masks(keys: Keys, parts: npt.NDArray[np.uint8], tier: Tier) -> PageMasks:
    """Return what a tier holds, a line for each part; a page may be there more than once."""
    bits = np.array([part_bit(part, tier) for part in Part], np.uint32)
    return PageMasks(keys, bits[parts])


def together(each: Sequence[PageMasks]) -> PageMasks:
    """Return what several say, each page once."""
    keys = np.concatenate([one.keys for one in each] or [NO_MASKS.keys])
    masks = np.concatenate([one.masks for one in each] or [NO_MASKS.masks])
    if len(keys) < 2:
        return PageMasks(keys, masks)
    # By the first eight bytes, which nearly always differ, and by all where they do not.
    words = keys.view(np.uint64)
    order = np.argsort(words[:, 0], kind="stable")
    near = words[order[1:], 0] == words[order[:-1], 0]
    if not near.any():
        return PageMasks(keys, masks)
    if not (words[order[1:]][near] == words[order[:-1]][near]).all():
        order = np.lexsort(words.T)
    is_first = np.ones(len(keys), bool)
    is_first[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    starts = np.flatnonzero(is_first)
    return PageMasks(keys[order[starts]], np.bitwise_or.reduceat(masks[order], starts))

"""Groups of consecutive pages, which the pool keeps together.

Covers how many pages a group has and which group a page is in. Pure. Does not cover which node keeps a group
(`pie.pool.placement`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.page.key import PageKey

GROUP_PAGES = 32


def group_keys(chain: Sequence[PageKey]) -> list[PageKey]:
    """Return for each page of a sequence the first key of its group.

    Args:
        chain: The keys of the sequence from its first page on.
    """
    return [chain[i - i % GROUP_PAGES] for i in range(len(chain))]

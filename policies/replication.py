"""How many pool nodes keep a page.

Covers that number, asked for a group of pages whenever it is stored or nodes come and go. Pure. Does
not cover which nodes those are (`pie.pool.placement`) or copying (`pie.pool.migration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pie.page.key import PageKey


class ReplicationPolicy(Protocol):
    """Says how many nodes keep the pages of a group."""

    def copies(self, group: PageKey, nodes: int) -> int:
        """Return how many of `nodes` nodes keep a group, 1 at least; more than there are is all.

        Args:
            group: The first key of the group.
            nodes: How many nodes take pages now.
        """
        ...


@dataclass(frozen=True, slots=True)
class FixedReplication:
    """The same number for every page."""

    count: int = 1

    def copies(self, group: PageKey, nodes: int) -> int:  # noqa: ARG002 - it is fixed
        """Return the number."""
        return min(self.count, max(1, nodes))


class TabledReplication:
    """More copies of some groups, as cluster policies order; of all others as many as usual.

    Args:
        usual: How many that is.
    """

    def __init__(self, usual: ReplicationPolicy) -> None:
        self._usual = usual
        self._table: Mapping[PageKey, int] = {}

    def set_table(self, table: Mapping[PageKey, int]) -> bool:
        """Take groups with more copies on, instead of those before; say whether that changes anything."""
        changes = table != self._table
        self._table = table
        return changes

    def copies(self, group: PageKey, nodes: int) -> int:
        """Return the number."""
        usual = self._usual.copies(group, nodes)
        return min(max(usual, self._table.get(group, 0)), max(usual, nodes))

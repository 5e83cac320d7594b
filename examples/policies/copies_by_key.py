"""A replication policy: groups of pages that somebody has chosen have more copies, always."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterView, SetCopies
from pie.policies.units import Count

Key = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class CopiesByKey:
    """So many copies of each of these groups, and no more of any other.

    Args:
        groups: Keys of the first pages of groups, in hexadecimal.
        copies: How many pool nodes keep each.
    """

    def __init__(self, groups: list[Key], copies: Count = 2) -> None:
        self._groups = [PageKey(bytes.fromhex(group)) for group in groups]
        self._copies = copies

    def decide(self, view: ClusterView) -> Iterable[SetCopies]:
        """Order what is not so yet."""
        now = {one.group: one.copies for one in view.groups}
        wanted = min(self._copies, view.nodes)
        for group in self._groups:
            if now.get(group, view.least_copies) != wanted >= view.least_copies:
                yield SetCopies(group, wanted, "it was chosen")
        for group in now.keys() - set(self._groups):
            if now[group] > view.least_copies:
                yield SetCopies(group, view.least_copies, "nobody has chosen it")

"""How many copies of groups several policies want, together.

Covers each policy's own numbers, of which the largest counts, and what an earlier leader left. Pure. Does
not cover what may be ordered (`pie.policies.cluster_manager`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterPolicy, FixedCopies


class Wishes:
    """By policy, groups of which it wants more copies than usual.

    Args:
        policies: The first one, unless it is `fixed`, looks after what an earlier leader ordered.
    """

    def __init__(self, policies: Sequence[ClusterPolicy]) -> None:
        self._wishes: list[dict[PageKey, int]] = [{} for _ in policies]
        self._heir: int | None = None
        if policies and not isinstance(policies[0], FixedCopies):
            self._heir = 0

    def copy(self) -> Wishes:
        """Return the same, to be changed by itself."""
        other = Wishes(())
        other._wishes = [dict(own) for own in self._wishes]
        other._heir = self._heir
        return other

    def of(self, number: int) -> Mapping[PageKey, int]:
        """Return what one policy wants."""
        return self._wishes[number]

    def set(self, number: int, group: PageKey, copies: int) -> None:
        """Learn what a policy wants of a group; 0 for no more than usual."""
        if copies:
            self._wishes[number][group] = copies
        else:
            self._wishes[number].pop(group, None)

    def most(self, group: PageKey) -> int:
        """Return the largest number that any policy wants; 0 where none wants more than usual."""
        return max((own.get(group, 0) for own in self._wishes), default=0)

    def inherit(self, table: Mapping[PageKey, int]) -> None:
        """Learn what is in force.

        What a policy wanted beyond that it may order anew, wherever it was lost; what is in force, and no policy
        wants, is the heir's from now on, where there is one.
        """
        for own in self._wishes:
            for group, copies in list(own.items()):
                if group not in table:
                    del own[group]
                elif copies > table[group]:
                    own[group] = table[group]
        if self._heir is None:
            return
        for group, copies in table.items():
            if not self.most(group):
                self._wishes[self._heir][group] = copies

    def unwanted(self, table: Mapping[PageKey, int]) -> dict[PageKey, int]:
        """Return groups with more copies than any policy wants, and how many one wants: 0 for no more than usual."""
        found = {group: self.most(group) for group in table}
        return {group: most for group, most in found.items() if most < table[group]}

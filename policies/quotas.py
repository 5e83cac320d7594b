"""Tenants over their quota in one tier: what they give before all others.

Covers how much each tenant has under each `quota` rule, and which of its pages leave while that is too much: those
unused for longest of the ones that can leave, and each page once those after it are proposed. Does not cover
which pages a rule is about (`pie.policies.rule_book`).

A tenant's leaves stand in a heap of its own, by latest use, so that what a chain of its pages looks like does not
matter, and what is proposed costs O(log n) a page, however many tenants there are.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.queued import QueuedRetention
from pie.policies.row_heap import RowHeap


@dataclass(slots=True, eq=False)
class _Account:
    """A tenant under a rule."""

    name: tuple[int, str]
    most: int
    leaves: RowHeap
    """By latest use."""
    used: int = 0
    pages: int = 0


class TenantQuotas:
    """The tenants under `quota` rules. Not thread-safe.

    Args:
        most: Bytes that each tenant may take, by the number of the rule.
        rows: The pages.
        queues: Tells which are leaves.
    """

    def __init__(self, most: Mapping[int, int], rows: PageRows, queues: QueuedRetention) -> None:
        self._most = most
        self._rows = rows
        self._queues = queues
        self._accounts: dict[tuple[int, str], _Account] = {}
        self._account_of: list[_Account | None] = []
        self._ticks = array("q")
        self._places = array("i")
        self._tick = 0
        """Uses so far; their order is the only clock here."""
        self._giving: dict[_Account, None] = {}
        """Tenants that have too much, and a page that can leave."""
        if most:
            queues.on_leaf = self._leaf_changed

    def joined(self, row: Row, rule: int, tenant: str) -> None:
        """Learn that a page came under a rule: it was just used, as far as this tier knows."""
        if len(self._account_of) < self._rows.capacity:
            missing = self._rows.capacity - len(self._account_of)
            self._account_of.extend([None] * missing)
            self._ticks.extend([0] * missing)
            self._places.extend([NO_ROW] * missing)
        name = (rule, tenant)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(
                name, self._most[rule], RowHeap(self._ticks, self._places)
            )
        self._account_of[row] = account
        account.used += self._rows.sizes[row]
        account.pages += 1
        self._tick += 1
        self._ticks[row] = self._tick
        if self._queues.is_leaf(row):
            account.leaves.put(row)
        self._judge(account)

    def used(self, row: Row) -> None:
        """Learn that one of the pages was used."""
        account = self._account_of[row]
        assert account is not None, "a page under no quota"
        self._tick += 1
        self._ticks[row] = self._tick
        if self._queues.is_leaf(row):
            account.leaves.put(row)

    def left(self, row: Row) -> None:
        """Learn that a page is about to leave the tier, or has left the rule."""
        account = self._account_of[row]
        assert account is not None, "a page under no quota"
        self._account_of[row] = None
        account.used -= self._rows.sizes[row]
        account.pages -= 1
        account.leaves.drop(row)
        self._judge(account)
        if not account.pages:
            del self._accounts[account.name]

    def victims(self, bytes_needed: int) -> list[Row]:
        """Propose what tenants have too much, as if each proposed page had left, until there is enough.

        Each tenant gives no more than brings it back to its quota, and nobody else's pages.
        """
        rows, ticks = self._rows, self._ticks
        proposed: list[Row] = []
        given: dict[_Account, int] = defaultdict(int)
        gone: dict[Row, int] = defaultdict(int)
        # Pages whose children are all proposed, by the tenant that they are of.
        bared: dict[_Account, list[tuple[int, Row]]] = defaultdict(list)
        waiting = deque[_Account]()
        taken: list[tuple[_Account, Row]] = []
        # Each of those that give has a page to propose, so none is looked at in vain.
        following = iter(self._giving)
        while bytes_needed > 0:
            account = waiting.popleft() if waiting else next(following, None)
            if account is None:
                break
            mine = bared[account]
            while bytes_needed > 0 and account.used - given[account] > account.most:
                row = account.leaves.first()
                if mine and (row < 0 or mine[0][0] < ticks[row]):
                    row = heapq.heappop(mine)[1]
                elif row >= 0:
                    account.leaves.drop(row)
                    taken.append((account, row))
                else:
                    break
                proposed.append(row)
                given[account] += rows.sizes[row]
                bytes_needed -= rows.sizes[row]
                parent = rows.parent(row)
                if parent < 0:
                    continue
                gone[parent] += 1
                owner = self._owner(parent)
                if owner is None or gone[parent] < rows.children[parent] or rows.pins[parent]:
                    continue
                heapq.heappush(bared[owner], (ticks[parent], parent))
                if owner is not account:
                    waiting.append(owner)
        for account, row in taken:
            account.leaves.put(row)
        return proposed

    def check(self) -> None:
        """Assert that the accounts agree with the pages; slow, for tests."""
        held = list(self._rows)
        for account in self._accounts.values():
            mine = [row for row in held if self._owner(row) is account]
            assert len(mine) == account.pages
            assert account.used == sum(self._rows.sizes[row] for row in mine)
            account.leaves.check()
            leaves = [row for row in mine if self._queues.is_leaf(row)]
            assert len(leaves) == len(account.leaves)
            assert all(self._places[row] >= 0 for row in leaves)
            assert (account in self._giving) == (account.used > account.most and bool(leaves))
        assert self._giving.keys() <= set(self._accounts.values())

    def _leaf_changed(self, row: Row, is_leaf: bool) -> None:
        account = self._owner(row)
        if account is None:
            return
        if is_leaf:
            account.leaves.put(row)
        else:
            account.leaves.drop(row)
        self._judge(account)

    def _owner(self, row: Row) -> _Account | None:
        """Return whose page it is; rows grow before all that has a column of them does."""
        return self._account_of[row] if row < len(self._account_of) else None

    def _judge(self, account: _Account) -> None:
        """Note whether a tenant gives."""
        if account.used > account.most and account.leaves:
            self._giving[account] = None
        else:
            self._giving.pop(account, None)

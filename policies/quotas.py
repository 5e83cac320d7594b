"""Tenants over their quota in one tier: what they give before all others.

Covers how much each tenant has under each `quota` rule, and which of its pages leave while that is too much: of the
ones that can leave those that no rule keeps, then those that one keeps, both the one unused for longest in front, and
each page once those after it are proposed. Does not cover which pages a rule is about (`pie.policies.rule_book`)
or which are kept: queues tell of it as a band.

A tenant's leaves stand in a heap of its own, so that what a chain of its pages looks like does not
matter, and what is proposed costs O(log n) a page, however many tenants there are.
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.queued import Band, QueuedRetention
from pie.policies.row_heap import RowHeap

_KEPT = 1 << 62
"""Comes before the latest use of a page that a rule keeps: after all uses."""


@dataclass(slots=True, eq=False)
class _Account:
    """A tenant under a rule."""

    name: tuple[int, str]
    most: int
    leaves: RowHeap[int]
    """In the order in which they are given."""
    used: int = 0
    pages: int = 0


class TenantQuotas:
    """The tenants under `quota` rules. Not thread-safe.

    Args:
        most: Bytes that each tenant may take, by the number of the rule.
        rows: The pages.
        queues: Tells which are leaves, and which are kept.
    """

    def __init__(self, most: Mapping[int, int], rows: PageRows, queues: QueuedRetention) -> None:
        self._most = most
        self._rows = rows
        self._queues = queues
        self._accounts: dict[tuple[int, str], _Account] = {}
        self._account_of: list[_Account | None] = []
        self._turns = array("q")
        """Of each page, under a quota or not: its latest use, and whether it is kept."""
        self._places = array("i")
        self._tick = 0
        """Uses so far; their order is the only clock here."""
        self._giving: dict[_Account, None] = {}
        """Tenants that have too much, and a page that can leave."""
        if most:
            queues.on_leaf = self._leaf_changed
            queues.on_band = self._band_changed

    def used(self, row: Row) -> None:
        """Learn that a page came or was used, whether it is under a quota or not."""
        if not self._most:
            return
        missing = self._rows.capacity - len(self._account_of)
        if missing > 0:
            self._account_of.extend([None] * missing)
            self._turns.extend([0] * missing)
            self._places.extend([NO_ROW] * missing)
        self._tick += 1
        self._set_turn(row, self._tick, self._queues.band_of(row))

    def joined(self, row: Row, rule: int, tenant: str) -> None:
        """Learn that a page came under a rule."""
        name = (rule, tenant)
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(
                name, self._most[rule], RowHeap(self._turns, self._places)
            )
        self._account_of[row] = account
        account.used += self._rows.sizes[row]
        account.pages += 1
        if self._queues.is_leaf(row):
            account.leaves.put(row)
        self._judge(account)

    def counts(self, row: Row) -> bool:
        """Say whether a page is under a quota."""
        return self._owner(row) is not None

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
        rows, turns = self._rows, self._turns
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
                if mine and (row < 0 or mine[0][0] < turns[row]):
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
                heapq.heappush(bared[owner], (turns[parent], parent))
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
            for row in mine:
                assert (self._turns[row] >= _KEPT) == (self._queues.band_of(row) is Band.LAST)
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

    def _band_changed(self, row: Row, band: Band) -> None:
        self._set_turn(row, self._turns[row] % _KEPT, band)

    def _set_turn(self, row: Row, tick: int, band: Band) -> None:
        turn = tick + _KEPT if band is Band.LAST else tick
        if turn == self._turns[row]:
            return
        self._turns[row] = turn
        # Of its tenant's pages it may stand elsewhere now.
        account = self._account_of[row]
        if account is not None and self._queues.is_leaf(row):
            account.leaves.put(row)

    def _owner(self, row: Row) -> _Account | None:
        """Return whose page it is; rows grow before all that has a column of them does."""
        return self._account_of[row] if row < len(self._account_of) else None

    def _judge(self, account: _Account) -> None:
        """Note whether a tenant gives."""
        if account.used > account.most and account.leaves:
            self._giving[account] = None
        else:
            self._giving.pop(account, None)

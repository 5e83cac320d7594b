"""Retention rules at work in one tier.

Covers which rule each page falls under, times that run out and tenants over their quota: what of it
bears on the order of victims is told to the queues as a band. Does not cover what rules may say
(`pie.policies.rules`), which conversations are kept (`pie.policies.kept_sessions`) or the order
within a band (`pie.policies.queued`).
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from pie.policies.kept_sessions import KeptSessions
from pie.policies.page_rows import PageRows, Row
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.policies.queued import Band, QueuedRetention
from pie.policies.retention import PageView
from pie.policies.rules import KeepSession, PersistPrefix, Pin, Quota, Rule, Ttl

_NO_RULE = -1
_MOST_TIMERS = 256
"""Times looked at before victims are chosen, at most: a look takes about a microsecond."""
_MOST_LOOKED_AT = 1024
"""Pages of a tenant over its quota that are looked at for some that can leave."""


class PageHistory(NamedTuple):
    """What rules know of a page's past in its tier."""

    hits: int
    stored_s: float
    used_s: float


class RuleBook:
    """The rules of one tier. Not thread-safe; not told of pages that are not held."""

    def __init__(
        self,
        rules: Sequence[Rule],
        rows: PageRows,
        queues: QueuedRetention,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> None:
        self._rules = rules
        self._prefixes = prefixes
        self._rows = rows
        self._queues = queues
        self.matched = [0] * len(rules)
        """Pages that fall under each rule now."""
        self._rule_of = array("h")
        self._hits = array("H")
        self._stored_s = array("d")
        self._used_s = array("d")
        self._owners: list[tuple[str, str]] = []
        """Tags of each page's tenant and conversation."""
        self._candidates: list[tuple[int, ...]] = []
        """For each row the rules that it may fall under, once it is old or was used often enough."""
        self._pinned_bytes = [0] * len(rules)
        self._timers: list[tuple[float, Row, bytes]] = []
        self._tenants: dict[tuple[int, str], dict[Row, None]] = {}
        """Pages of each tenant under a quota, the one unused for longest in front."""
        self._tenant_bytes: dict[tuple[int, str], int] = {}
        self._sessions = {
            number: KeptSessions(rule.action, rows, queues)
            for number, rule in enumerate(rules)
            if isinstance(rule.action, KeepSession)
        }

    def history(self, row: Row) -> PageHistory:
        """Return what is known of a page's past."""
        return PageHistory(self._hits[row], self._stored_s[row], self._used_s[row])

    def stored(
        self, row: Row, page: PageView, now_s: float, past: PageHistory | None = None
    ) -> None:
        """Find the rule of a page that is new here, though it may have a past."""
        missing = self._rows.capacity - len(self._rule_of)
        if missing > 0:
            self._rule_of.extend([_NO_RULE] * missing)
            self._hits.extend([0] * missing)
            self._stored_s.extend([0.0] * missing)
            self._used_s.extend([0.0] * missing)
            self._owners.extend([("", "")] * missing)
            self._candidates.extend([()] * missing)
        past = past or PageHistory(0, now_s, now_s)
        self._hits[row], self._stored_s[row], self._used_s[row] = past
        self._owners[row] = (page.tenant_tag, page.session_tag)
        rules = self._rules
        matching = tuple(
            n for n, rule in enumerate(rules) if rule.selector.matches(page, self._prefixes)
        )
        if any(rules[n].selector.hits or rules[n].selector.age_s for n in matching):
            self._candidates[row] = matching
            for age_s in {rules[n].selector.age_s for n in matching} - {0.0}:
                heapq.heappush(self._timers, (past.stored_s + age_s, row, page.key))
        self._put_under(row, self._first_of(row, matching, now_s))

    def hit(self, row: Row, now_s: float) -> None:
        """Learn that a page was used."""
        self._hits[row] = min(self._hits[row] + 1, 0xFFFF)
        self.used_above(row, now_s)
        self._choose_anew(row, now_s)

    def used_above(self, row: Row, now_s: float) -> None:
        """Learn that a page was used in a faster tier lately: times begin anew."""
        self._used_s[row] = now_s
        number = self._rule_of[row]
        if self._queues.band_of(row) is Band.FIRST:
            self._queues.set_band(row, Band.ORDER)
        if number == _NO_RULE:
            return
        tenant = self._tenants.get((number, self._owners[row][0]))
        if tenant is not None:
            del tenant[row]
            tenant[row] = None
        elif number in self._sessions:
            self._sessions[number].used(row, self._owners[row], now_s)

    def removed(self, row: Row) -> None:
        """Learn that a page has left."""
        self._take_from(row)
        self._candidates[row] = ()

    def is_persistent(self, row: Row) -> bool:
        """Say whether a page is one of those that are to outlive a restart."""
        number = self._rule_of[row]
        return (
            number != _NO_RULE
            and isinstance(self._rules[number].action, PersistPrefix)
            and self._queues.band_of(row) is Band.LAST
        )

    def settle(self, now_s: float) -> None:
        """See to it that what should leave first stands in front, some of it at a time."""
        timers = self._timers
        for _ in range(_MOST_TIMERS):
            if not timers or timers[0][0] > now_s:
                break
            _, row, key = heapq.heappop(timers)
            if self._rows.key(row) != key:
                continue
            self._choose_anew(row, now_s)
            number = self._rule_of[row]
            action = self._rules[number].action if number != _NO_RULE else None
            if not isinstance(action, Ttl):
                continue
            due_s = self._used_s[row] + action.after
            if due_s > now_s:
                heapq.heappush(timers, (due_s, row, key))
            else:
                self._queues.set_band(row, Band.FIRST)
                # Used again before it leaves, it is due again.
                heapq.heappush(timers, (now_s + action.after, row, key))
        for tenant, used in self._tenant_bytes.items():
            action = self._rules[tenant[0]].action
            if isinstance(action, Quota) and used > action.max:
                self._give_up(tenant, used - action.max)
        for sessions in self._sessions.values():
            sessions.settle(now_s)

    def check(self) -> None:
        """Assert that the book agrees with itself; slow, for tests."""
        rows = self._rows
        matched = [0] * len(self._rules)
        for row in rows:
            if self._rule_of[row] != _NO_RULE:
                matched[self._rule_of[row]] += 1
        assert matched == self.matched
        for tenant, pages in self._tenants.items():
            assert self._tenant_bytes[tenant] == sum(rows.sizes[row] for row in pages)
            assert all(self._rule_of[row] == tenant[0] for row in pages)
            assert all(self._owners[row][0] == tenant[1] for row in pages)
        for sessions in self._sessions.values():
            sessions.check()

    def _first_of(self, row: Row, candidates: Sequence[int], now_s: float) -> int:
        """Return the first rule whose number of uses and age a page has reached."""
        hits, age_s = self._hits[row], now_s - self._stored_s[row]
        for number in candidates:
            selector = self._rules[number].selector
            if selector.hits <= hits and selector.age_s <= age_s:
                return number
        return _NO_RULE

    def _choose_anew(self, row: Row, now_s: float) -> None:
        """Put a page under another rule where its uses or its age now say so."""
        candidates = self._candidates[row]
        if not candidates:
            return
        first = self._first_of(row, candidates, now_s)
        if first != self._rule_of[row]:
            self._take_from(row)
            self._put_under(row, first)

    def _put_under(self, row: Row, number: int) -> None:
        self._rule_of[row] = number
        if number == _NO_RULE:
            return
        self.matched[number] += 1
        action, size = self._rules[number].action, self._rows.sizes[row]
        if isinstance(action, (Pin, PersistPrefix)):
            if action.max is None or self._pinned_bytes[number] + size <= action.max:
                self._pinned_bytes[number] += size
                self._queues.set_band(row, Band.LAST)
        elif isinstance(action, Ttl):
            heapq.heappush(
                self._timers, (self._used_s[row] + action.after, row, self._rows.key(row))
            )
        elif isinstance(action, KeepSession):
            self._sessions[number].used(row, self._owners[row], self._used_s[row])
        else:
            tenant = (number, self._owners[row][0])
            self._tenants.setdefault(tenant, {})[row] = None
            self._tenant_bytes[tenant] = self._tenant_bytes.get(tenant, 0) + size

    def _take_from(self, row: Row) -> None:
        number = self._rule_of[row]
        self._rule_of[row] = _NO_RULE
        if number == _NO_RULE:
            return
        self.matched[number] -= 1
        action, size = self._rules[number].action, self._rows.sizes[row]
        if isinstance(action, (Pin, PersistPrefix)) and self._queues.band_of(row) is Band.LAST:
            self._pinned_bytes[number] -= size
        elif isinstance(action, KeepSession):
            self._sessions[number].left(row, self._owners[row])
        elif isinstance(action, Quota):
            tenant = (number, self._owners[row][0])
            del self._tenants[tenant][row]
            self._tenant_bytes[tenant] -= size
            if not self._tenants[tenant]:
                del self._tenants[tenant], self._tenant_bytes[tenant]
        self._queues.set_band(row, Band.ORDER)

    def _give_up(self, tenant: tuple[int, str], excess_bytes: int) -> None:
        """Put pages of a tenant in front that are together as large as what it has too much."""
        queues = self._queues
        for row in islice(self._tenants[tenant], _MOST_LOOKED_AT):
            if excess_bytes <= 0:
                return
            if queues.band_of(row) is not Band.FIRST and queues.is_leaf(row):
                queues.set_band(row, Band.FIRST)
            if queues.band_of(row) is Band.FIRST:
                excess_bytes -= self._rows.sizes[row]

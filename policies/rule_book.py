"""Retention rules at work in one tier.

Covers which rules each page falls under, one that says how long it stays and one `quota`, and times that run
out: what of it bears on the order of victims is told to the queues as a band. Does not cover what rules may say (`pie.policies.rules`), which
conversations are kept (`pie.policies.kept_sessions`), whose pages have the room that a rule leaves (`pie.policies.kept_shares`), what tenants over their quota give
(`pie.policies.quotas`) or the order within a band (`pie.policies.queued`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from pie.policies.kept_sessions import KeptSessions
from pie.policies.kept_shares import KeptShares
from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.policies.queued import Band, QueuedRetention
from pie.policies.quotas import TenantQuotas
from pie.policies.retention import PageView
from pie.policies.row_heap import RowHeap
from pie.policies.rules import MOST_HITS, KeepSession, PersistPrefix, Pin, Quota, Rule, Ttl

_NO_RULE = -1
_MOST_TIMERS = 256
"""Times looked at before victims are chosen, at most: a look takes about a microsecond."""
_NEVER_S = math.inf


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
        self._of_any: list[int] = []
        """Rules that select by no named prefix."""
        self._of_prefix: dict[str, list[int]] = {}
        for number, rule in enumerate(rules):
            name = rule.selector.prefix_name
            (self._of_any if name is None else self._of_prefix.setdefault(name, [])).append(number)
        self.prefixes = prefixes if self._of_prefix else NO_PREFIXES
        """Those that rules select by; empty where none does."""
        self._rows = rows
        self._queues = queues
        self.matched = [0] * len(rules)
        """Pages that fall under each rule now."""
        self._is_quota = [isinstance(rule.action, Quota) for rule in rules]
        self._rule_of = array("h")
        """What says how long each page stays: no `quota`."""
        self._quota_of = array("h")
        self._hits = array("H")
        self._stored_s = array("d")
        self._used_s = array("d")
        self._owners: list[tuple[str, str]] = []
        """Tags of each page's tenant and conversation."""
        self._is_shared = array("B")
        """Whether several pages have come after each page, or after one that comes after it; where sessions are kept."""
        self._candidates: list[tuple[int, ...]] = []
        """For each row the rules that it may fall under, once it is old or was used often enough."""
        self._due_s = array("d")
        """When each page is to be looked at."""
        self._timer_places = array("i")
        self._timers = RowHeap(self._due_s, self._timer_places)
        self._quotas = TenantQuotas(
            {n: rule.action.max for n, rule in enumerate(rules) if isinstance(rule.action, Quota)},
            rows,
            queues,
        )
        self._shares = {
            number: KeptShares(rule.action.max, rows, queues)
            for number, rule in enumerate(rules)
            if isinstance(rule.action, (Pin, PersistPrefix))
        }
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
        """Find the rules of a page that is new here, though it may have a past."""
        missing = self._rows.capacity - len(self._rule_of)
        if missing > 0:
            self._rule_of.extend([_NO_RULE] * missing)
            self._quota_of.extend([_NO_RULE] * missing)
            self._hits.extend([0] * missing)
            self._stored_s.extend([0.0] * missing)
            self._used_s.extend([0.0] * missing)
            self._due_s.extend([_NEVER_S] * missing)
            self._timer_places.extend([NO_ROW] * missing)
            self._owners.extend([("", "")] * missing)
            self._is_shared.extend([0] * missing)
            self._candidates.extend([()] * missing)
        past = past or PageHistory(0, now_s, now_s)
        self._hits[row], self._stored_s[row], self._used_s[row] = past
        self._owners[row] = (page.tenant_tag, page.session_tag)
        rules = self._rules
        names = self.prefixes.names_of(page) if len(self.prefixes) else ()
        numbers = self._of_any
        if names:
            # Of hundreds of rules for a prefix each, few are for the page's.
            named = (n for name in names for n in self._of_prefix.get(name, ()))
            numbers = sorted([*numbers, *named])
        matching = tuple(n for n in numbers if rules[n].selector.matches(page, names))
        if any(rules[n].selector.hits or rules[n].selector.age_s for n in matching):
            self._candidates[row] = matching
        rule, quota = self._first_of(row, matching, now_s)
        if self._sessions:
            self._mark_shared(row)
        self._quotas.used(row)
        self._put_under(row, rule)
        self._put_under_quota(row, quota)
        self._set_timer(row, now_s)

    def hit(self, row: Row, now_s: float) -> None:
        """Learn that a page was used."""
        self._hits[row] = min(self._hits[row] + 1, MOST_HITS)
        self.used_above(row, now_s)
        self._choose_anew(row, now_s)

    def used_above(self, row: Row, now_s: float) -> None:
        """Learn that a page was used in a faster tier lately: times begin anew."""
        self._used_s[row] = now_s
        self._quotas.used(row)
        number = self._rule_of[row]
        if self._queues.band_of(row) is Band.FIRST:
            self._queues.set_band(row, Band.MIDDLE)
            self._set_timer(row, now_s)
        if number in self._shares:
            self._shares[number].used(row, self._owners[row][0])
        elif number in self._sessions and not self._is_shared[row]:
            self._sessions[number].used(row, self._owners[row], now_s)

    def removed(self, row: Row) -> None:
        """Learn that a page has left."""
        if self._sessions:
            self._unmark_shared(row)
        self._put_under_quota(row, _NO_RULE)
        self._take_from(row)
        self._candidates[row] = ()
        self._timers.drop(row)

    def over_quota(self, bytes_needed: int) -> list[Row]:
        """Propose what tenants have beyond their quotas, which leaves before all else."""
        return self._quotas.victims(bytes_needed)

    def is_persistent(self, row: Row) -> bool:
        """Say whether a page is one of those that are to outlive a restart."""
        number = self._rule_of[row]
        return (
            number != _NO_RULE
            and isinstance(self._rules[number].action, PersistPrefix)
            and self._queues.band_of(row) is Band.LAST
        )

    def uses_to_keep(self, row: Row) -> int | None:
        """Return how often a page was used that is to outlive a restart; 0 where not for that, None where it is not."""
        if not self.is_persistent(row):
            return None
        return self._hits[row] if self._rules[self._rule_of[row]].selector.hits else 0

    def settle(self, now_s: float) -> None:
        """See to it that what should leave first stands in front, some of it at a time."""
        for _ in range(_MOST_TIMERS):
            row = self._timers.first()
            if row < 0 or self._due_s[row] > now_s:
                break
            self._timers.drop(row)
            self._choose_anew(row, now_s)
            if self._runs_out_s(row) <= now_s:
                self._queues.set_band(row, Band.FIRST)
            self._set_timer(row, now_s)
        for sessions in self._sessions.values():
            sessions.settle(now_s)

    def check(self) -> None:
        """Assert that the book agrees with itself; slow, for tests."""
        rows = self._rows
        matched = [0] * len(self._rules)
        for row in rows:
            rule, quota = self._rule_of[row], self._quota_of[row]
            assert rule == _NO_RULE or not self._is_quota[rule]
            assert quota == _NO_RULE or self._is_quota[quota]
            for number in {rule, quota} - {_NO_RULE}:
                matched[number] += 1
        assert matched == self.matched
        self._quotas.check()
        counted = [row for row in rows if self._quota_of[row] != _NO_RULE]
        assert counted == [row for row in rows if self._quotas.counts(row)]
        self._timers.check()
        assert sum(place >= 0 for place in self._timer_places) == len(self._timers)
        assert len(self._timers) <= len(rows)
        for sessions in self._sessions.values():
            sessions.check()
        for shares in self._shares.values():
            shares.check()
        if self._sessions:
            self._check_marks()

    def _check_marks(self) -> None:
        rows, is_shared = self._rows, self._is_shared
        for row in rows:
            before = rows.before(row)
            assert is_shared[row] or rows.children[row] < 2
            assert is_shared[before] or not is_shared[row]
        assert not any(
            marked
            for row, marked in enumerate(is_shared)
            if not rows.is_held(row) and not rows.children[row]
        )

    def _mark_shared(self, row: Row) -> None:
        """Note which pages others go on from now that one is new, in whatever order they come; each is marked once."""
        rows, is_shared = self._rows, self._is_shared
        before = rows.before(row)
        if rows.children[row] > 1:
            is_shared[row] = 1
        if rows.children[before] > 1 or is_shared[row]:
            # A page that is not held has a mark too while one after it is.
            while before != NO_ROW and not is_shared[before]:
                is_shared[before] = 1
                before = rows.before(before)

    def _unmark_shared(self, row: Row) -> None:
        """Take the marks of rows that are free once a page has left."""
        rows = self._rows
        before = rows.before(row)
        if rows.children[row] == (before == row):
            self._is_shared[row] = 0
        if rows.children[before] == 1 and not rows.is_held(before):
            self._is_shared[before] = 0

    def _first_of(self, row: Row, candidates: Sequence[int], now_s: float) -> tuple[int, int]:
        """Return the first rule and the first quota whose number of uses and age a page has reached."""
        hits, stored_s = self._hits[row], self._stored_s[row]
        rule = quota = _NO_RULE
        for number in candidates:
            is_quota = self._is_quota[number]
            if (quota if is_quota else rule) != _NO_RULE:
                continue
            selector = self._rules[number].selector
            # As a timer is set, so that no rounding comes between the two.
            if selector.hits > hits or (selector.age_s and stored_s + selector.age_s > now_s):
                continue
            if is_quota:
                quota = number
            else:
                rule = number
        return rule, quota

    def _choose_anew(self, row: Row, now_s: float) -> None:
        """Put a page under other rules where its uses or its age now say so."""
        candidates = self._candidates[row]
        if not candidates:
            return
        rule, quota = self._first_of(row, candidates, now_s)
        if rule != self._rule_of[row]:
            self._take_from(row)
            self._put_under(row, rule)
            self._set_timer(row, now_s)
        if quota != self._quota_of[row]:
            self._put_under_quota(row, quota)

    def _runs_out_s(self, row: Row) -> float:
        """Return when a page is to leave before all others."""
        number = self._rule_of[row]
        action = self._rules[number].action if number != _NO_RULE else None
        return self._used_s[row] + action.after if isinstance(action, Ttl) else _NEVER_S

    def _set_timer(self, row: Row, now_s: float) -> None:
        """See to it that a page is looked at when its rule may be another, or its time is over."""
        due_s = self._runs_out_s(row) if self._queues.band_of(row) is not Band.FIRST else _NEVER_S
        for number in self._candidates[row]:
            if age_s := self._rules[number].selector.age_s:
                old_s = self._stored_s[row] + age_s
                due_s = min(due_s, old_s) if old_s > now_s else due_s
        # Where it is looked at before, this is found out then.
        is_set = self._timer_places[row] >= 0
        if due_s != _NEVER_S and not (is_set and self._due_s[row] <= due_s):
            self._due_s[row] = due_s
            self._timers.put(row)

    def _put_under(self, row: Row, number: int) -> None:
        self._rule_of[row] = number
        if number == _NO_RULE:
            return
        self.matched[number] += 1
        if number in self._shares:
            self._shares[number].used(row, self._owners[row][0])
        elif number in self._sessions:
            self._sessions[number].used(row, self._owners[row], self._used_s[row])

    def _put_under_quota(self, row: Row, number: int) -> None:
        """Let a page count under a quota, or under none, and no longer under the one it had."""
        before, self._quota_of[row] = self._quota_of[row], number
        if before != _NO_RULE:
            self.matched[before] -= 1
            self._quotas.left(row)
        if number != _NO_RULE:
            self.matched[number] += 1
            self._quotas.joined(row, number, self._owners[row][0])

    def _take_from(self, row: Row) -> None:
        number = self._rule_of[row]
        self._rule_of[row] = _NO_RULE
        if number == _NO_RULE:
            return
        self.matched[number] -= 1
        if number in self._shares:
            self._shares[number].left(row, self._owners[row][0])
        elif number in self._sessions:
            self._sessions[number].left(row, self._owners[row])
        self._queues.set_band(row, Band.MIDDLE)

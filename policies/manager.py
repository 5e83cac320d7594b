"""The manager of one tier's pages: policies propose, it disposes.

Covers sizes, pins, and containing a policy; pure, for one tier at one place. Does not cover the
order of victims (`pie.policies.lru` and other policies), what becomes of a proposal
(`pie.policies.victims`) or the pages' bytes (`pie.pool`, `pie.worker`).

Rules (`pie.policies.rules`) come before policies: what they want to leave first leaves before a
policy is asked, and what they keep leaves after all else.

What a policy cannot break: a pinned page never leaves, a page that is not held is not counted, and
enough pages are found whenever enough are unpinned. A policy that raises, whatever it
is (`pie.policies.containing`), or proposes too little is logged, counted, and helped out by `lru`,
which is told of every event for that purpose.

Built-in policies share the manager's table of pages and are told of rows; a user's policy has the
contract of `pie.policies.retention` and is told of pages.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

from pie.page.columns import PageColumns
from pie.page.events import PageEntry, Part, Tier
from pie.page.key import PageKey
from pie.page.key_table import Keys
from pie.policies.containing import is_builtin, is_own
from pie.policies.failing import behind, failures_of
from pie.policies.hand_over import HandOver
from pie.policies.lru import LruRetention
from pie.policies.page_rows import NO_ROW, PageRows, Row
from pie.policies.prefixes import NO_PREFIXES, LeadingPages, Prefixes
from pie.policies.queued import Band, QueuedRetention
from pie.policies.retention import PageView, RetentionPolicy, SeesPins, seeing_pins
from pie.policies.rule_book import PageHistory, RuleBook
from pie.policies.rules import PersistPrefix, Rule, Ruled
from pie.policies.telling import name_of
from pie.policies.victims import HeldPage, ManagerCounts, VictimChoice

log = logging.getLogger("pie.policies.manager")

_NONSENSE_LIMIT = 1_000
"""Proposals beyond one for each held page, after which a policy is taken for an endless one."""

_AT_ONCE = 1 << 17
"""Pages that are given rows together, which takes memory as long as it lasts."""


class RetentionManager:
    """Keeps sizes and pins of the pages in one tier, and asks a policy which should leave.

    Not thread-safe: the owner of the tier calls it under its own lock or from one thread. Calls
    about pages that are not held are harmless unless said otherwise.

    Args:
        policy: Who proposes victims; `lru` where None.
        name: What log lines call this manager, such as `device` or `pool ram`.
    """

    def __init__(self, policy: RetentionPolicy | None = None, *, name: str = "tier") -> None:
        self._rows = PageRows()
        rules: Sequence[Rule] = ()
        prefixes = NO_PREFIXES
        if isinstance(policy, Ruled):
            rules, prefixes, policy = policy.rules, policy.prefixes, policy.policy
        self._failures = failures_of(policy)
        self._users: RetentionPolicy | None = None
        if isinstance(policy, QueuedRetention) and is_builtin(policy):
            self._builtin: QueuedRetention = policy
        else:
            self._users = policy
            self._builtin = LruRetention()
        self._builtin.share(self._rows)
        self._seeing = _told_of_pins(self._users)
        self._book = RuleBook(rules, self._rows, self._builtin, prefixes) if rules else None
        self.has_persistent = any(isinstance(rule.action, PersistPrefix) for rule in rules)
        """Whether there may be pages that are to outlive a restart."""
        self._name = name
        self._used_bytes = 0
        self._pinned_bytes = 0
        self._next: RetentionManager | None = None
        """Who takes over, and is told of all that this one is told of."""
        self.counts = ManagerCounts()

    @property
    def policy_name(self) -> str:
        """The class of the policy that is asked."""
        return name_of(type(behind(self._users or self._builtin)))

    @property
    def used_bytes(self) -> int:
        """Bytes of all held pages."""
        return self._used_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pages that are pinned now."""
        return self._pinned_bytes

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, page: HeldPage) -> bool:
        return self._rows.find(*page) >= 0

    @property
    def capacity(self) -> int:
        """How many rows there are for pages, free ones among them."""
        return self._rows.capacity

    def pages(self, start: Row, stop: Row) -> list[HeldPage]:
        """Return the held pages of some rows, `start` among them and `stop` not."""
        rows = self._rows
        return [(rows.key(row), rows.part(row)) for row in rows.between(start, stop)]

    def columns(self) -> tuple[Keys, npt.NDArray[np.uint8]]:
        """Return keys and parts of all held pages."""
        rows = self._rows.held()
        return self._rows.keys(rows), np.array(self._rows.parts, np.uint8)[rows]

    def size(self, key: PageKey, part: Part) -> int:
        """Return the bytes of a held page; 0 where it is not held."""
        row = self._rows.find(key, part)
        return self._rows.sizes[row] if row >= 0 else 0

    def entry(self, key: PageKey, part: Part, tier: Tier) -> PageEntry | None:
        """Return what is known of a held page, which is all but its tenant; None where it is not held."""
        rows = self._rows
        row = rows.find(key, part)
        if row < 0:
            return None
        return PageEntry(key, rows.parent_key(row), rows.indexes[row], part, tier, rows.sizes[row])

    def pins(self, key: PageKey, part: Part) -> int:
        """Return how many pins keep a page where it is; 0 where it is not held."""
        row = self._rows.find(key, part)
        return self._rows.pins[row] if row >= 0 else 0

    def stored(self, page: PageView, now_s: float, *, uses: int = 0) -> None:
        """Learn that `page` is held from now on; one that is held already was just used.

        `uses` is how often it was used before, as far as rules are to go by it.
        """
        if self._rows.find(page.key, page.part) >= 0:
            self.hit(page.key, page.part, now_s)
            return
        if self._next is not None:
            self._next.stored(page, now_s, uses=uses)
        self._store(page, now_s, _past(uses, now_s))

    def _store(self, page: PageView, now_s: float, past: PageHistory | None = None) -> None:
        self._used_bytes += page.bytes
        row = self._rows.add(page)
        self._builtin.row_stored(row)
        if self._book is not None:
            self._book.stored(row, page, now_s, past)
        self._tell_stored(page, now_s)

    def adopt(
        self,
        pages: PageColumns,
        views: Iterable[PageView],
        now_s: float,
        uses_of: Callable[[HeldPage], int] = lambda _: 0,
    ) -> None:
        """Learn that pages are held from now on, each once and none of them before; the oldest are first.

        Args:
            pages: The pages.
            views: The same, for those who must see each of them: read only where there are any.
            now_s: The time.
            uses_of: Returns how often a page was used before.
        """
        if not len(pages.keys):
            return
        if self._next is not None:
            views = list(views)
            self._next.adopt(pages, views, now_s, uses_of)
        steps = (slice(start, start + _AT_ONCE) for start in range(0, len(pages.keys), _AT_ONCE))
        rows = np.concatenate([self._rows.add_all(pages.take(step)) for step in steps])
        self._used_bytes += int(pages.sizes.sum())
        self._builtin.rows_stored(rows)
        if self._book is None and self._users is None:
            return
        for page in views:
            row = self._rows.find(page.key, page.part)
            if self._book is not None and row >= 0:
                past = _past(uses_of((page.key, page.part)), now_s)
                self._book.stored(row, page, now_s, past)
            self._tell_stored(page, now_s)

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a held page was used."""
        row = self._rows.find(key, part)
        if row < 0:
            return
        if self._next is not None:
            self._next.hit(key, part, now_s)
        self._builtin.row_hit(row)
        if self._book is not None:
            self._book.hit(row, now_s)
        if self._users is not None:
            try:
                self._users.hit(key, part, now_s)
            except BaseException as error:
                if not is_own(error):
                    raise
                self._failed("hit", error)

    def used_above(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a faster tier, which used a held page, has it no more: rules count time anew.

        It is no use of the page here, so policies do not learn from it.
        """
        row = self._rows.find(key, part)
        if row >= 0 and self._book is not None:
            self._book.used_above(row, now_s)
        if self._next is not None:
            self._next.used_above(key, part, now_s)

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held; its pins, if it had any, are gone with it."""
        row = self._rows.find(key, part)
        if row < 0:
            return
        if self._next is not None:
            self._next.removed(key, part)
        size = self._rows.sizes[row]
        self._used_bytes -= size
        if self._rows.pins[row]:
            self._pinned_bytes -= size
        if self._book is not None:
            self._book.removed(row)
        self._builtin.row_removed(row, key, part, self._rows.remove(row))
        if self._users is not None:
            try:
                self._users.removed(key, part)
            except BaseException as error:
                if not is_own(error):
                    raise
                self._failed("removed", error)

    def is_persistent(self, key: PageKey, part: Part) -> bool:
        """Say whether rules want a held page to outlive a restart."""
        row = self._rows.find(key, part)
        return row >= 0 and self._book is not None and self._book.is_persistent(row)

    def uses_to_keep(self, key: PageKey, part: Part) -> int | None:
        """Return how often a held page was used that rules want to outlive a restart for that.

        It is 0 where they want it for another reason, and None where they do not.
        """
        row = self._rows.find(key, part)
        return None if row < 0 or self._book is None else self._book.uses_to_keep(row)

    def persistent(self) -> list[HeldPage]:
        """Return the pages that are to outlive a restart, with those before them, in order of place."""
        rows, book = self._rows, self._book
        wanted: set[Row] = set()
        for row in rows if book is not None else ():
            before = row if book is not None and book.is_persistent(row) else NO_ROW
            while before >= 0 and before not in wanted:
                wanted.add(before)
                before = rows.parent(before)
        in_order = sorted(wanted, key=lambda row: rows.indexes[row])
        return [(rows.key(row), rows.part(row)) for row in in_order]

    def pin(self, key: PageKey, part: Part) -> bool:
        """Keep a page where it is until `unpin`; pins count. Says whether it is held at all."""
        row = self._rows.find(key, part)
        if row < 0:
            return False
        if self._next is not None:
            self._next.pin(key, part)
        pins = self._rows.pins
        pins[row] += 1
        if pins[row] == 1:
            self._pinned_bytes += self._rows.sizes[row]
            self._builtin.row_pinned(row)
            if (seeing := self._seeing) is not None:
                self._tell_pins("pinned", lambda: seeing.pinned(key, part))
        return True

    def unpin(self, key: PageKey, part: Part) -> None:
        """Take one pin from a page.

        Raises:
            ValueError: The page has no pin: pins and unpins of its owner do not match.
        """
        row, pins = self._rows.find(key, part), self._rows.pins
        if row < 0 or not pins[row]:
            raise ValueError(f"{self._name}: unpin of a page that has no pin: {key.hex()} {part!r}")
        if self._next is not None and self._next.pins(key, part):
            self._next.unpin(key, part)
        pins[row] -= 1
        if not pins[row]:
            self._pinned_bytes -= self._rows.sizes[row]
            self._builtin.row_unpinned(row)
            if (seeing := self._seeing) is not None:
                self._tell_pins("unpinned", lambda: seeing.unpinned(key, part))

    def begin_replace(self, policy: RetentionPolicy | None) -> HandOver:
        """Begin to hand all pages to another policy; return them.

        Once put in order, each is to be given to `move_over`, some at a time; this policy answers until
        `end_replace`. What comes, goes or is used meanwhile is told to both.
        """
        self._next = RetentionManager(policy, name=self._name)
        self._next.counts = self.counts
        return HandOver(self._rows, self._builtin.stamps)

    def abandon_replace(self) -> None:
        """Go on with this policy: nobody takes over."""
        self._next = None

    @property
    def next_sees_pages(self) -> bool:
        """Whether who takes over must know whose pages they are: rules and users' policies do."""
        following = self._next
        return following is not None and following.sees_pages

    @property
    def prefixes(self) -> Prefixes:
        """The named prefixes that rules select by, those of who takes over where somebody does.

        They are to learn of pages that were there before, or come in any order: `Prefixes.learn`.
        """
        if self._next is not None:
            return self._next.prefixes
        return NO_PREFIXES if self._book is None else self._book.prefixes

    def leading(self, start: Row, stop: Row, most: int) -> LeadingPages:
        """Return those of the held pages of some rows that are among the first `most` of their sequences."""
        return self._rows.leading(start, stop, most)

    @property
    def sees_pages(self) -> bool:
        """Whether there are rules or a user's policy, which look at each page."""
        return self._book is not None or self._users is not None

    def move_over(self, page: PageView, now_s: float, *, uses: int = 0) -> None:
        """Hand a page to the policy that takes over, with its pins and what rules know of it.

        Where there were no rules, it was used as often as `uses` says.
        """
        row, following = self._rows.find(page.key, page.part), self._next
        if following is None or row < 0 or (page.key, page.part) in following:
            return
        past = _past(uses, now_s) if self._book is None else self._book.history(row)
        following.take_on(page, now_s, past, pins=self._rows.pins[row])

    def take_on(
        self, page: PageView, now_s: float, past: PageHistory | None = None, *, pins: int = 0
    ) -> None:
        """Learn of a page that is not known here and was held before, as `move_over` hands it on."""
        self._store(page, now_s, past)
        for _ in range(pins):
            self.pin(page.key, page.part)

    def end_replace(self) -> None:
        """Let the other policy answer: it has all pages now."""
        following, self._next = self._next, None
        assert following is not None, "nobody takes over"
        assert len(following) == len(self), "pages were not handed over"
        self._become(following)

    def _become(self, other: RetentionManager) -> None:
        self._rows, self._builtin, self._users = other._rows, other._builtin, other._users
        self._book, self.has_persistent = other._book, other.has_persistent
        self._failures, self._seeing = other._failures, other._seeing
        self._used_bytes, self._pinned_bytes = other._used_bytes, other._pinned_bytes
        self.counts.replaced()

    def victims(self, bytes_needed: int, now_s: float) -> list[HeldPage]:
        """Return pages to remove, in that order, of `bytes_needed` bytes or more together.

        Fewer bytes come back only where all unpinned pages are not enough; then it is all of them.
        Nothing is removed: the caller removes them and calls `removed`. The pages before a pinned
        one in its sequence leave after all others, because it is of no use without them.
        """
        if bytes_needed <= 0:
            return []
        choice = VictimChoice(self._rows, self.counts, bytes_needed, self._is_kept)
        first: list[Row] = []
        if self._book is not None:
            self._book.settle(now_s)
            first = self._book.over_quota(bytes_needed)
        if self._users is not None:
            known = set(first)
            over = (row for row in self._builtin.first_victims() if row not in known)
            choice.consider_rows(chain(first, over))
            if choice.missing_bytes > 0:
                self._ask(self._users, choice, now_s)
            first = []
        if choice.missing_bytes > 0:
            proposed_bytes = choice.seen_bytes
            choice.consider_rows(chain(first, self._builtin.row_victims(first)))
            # What is before a page in use may be proposed by nobody: that is no failure of a policy.
            self.counts.fallbacks += self._users is not None and choice.seen_bytes > proposed_bytes
        if choice.missing_bytes > 0:
            choice.consider_last()
        self.counts.victims += len(choice.rows)
        rows = self._rows
        return [(rows.key(row), rows.part(row)) for row in choice.rows]

    def check(self) -> None:
        """Assert that the manager agrees with itself; slow, for tests."""
        rows = self._rows
        rows.check()
        self._builtin.check()
        if self._book is not None:
            self._book.check()
        if self._next is not None:
            self._next.check()
        assert self._used_bytes == sum(rows.sizes[row] for row in rows)
        assert self._pinned_bytes == sum(rows.sizes[row] for row in rows if rows.pins[row])
        assert all(rows.pins[row] >= 0 for row in rows)

    def _is_kept(self, row: Row) -> bool:
        return self._builtin.band_of(row) is Band.LAST

    def _tell_stored(self, page: PageView, now_s: float) -> None:
        if self._users is not None:
            try:
                self._users.stored(page, now_s)
            except BaseException as error:
                if not is_own(error):
                    raise
                self._failed("stored", error)

    def _tell_pins(self, call: str, tell: Callable[[], None]) -> None:
        try:
            tell()
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed(call, error)

    def _ask(self, policy: RetentionPolicy, choice: VictimChoice, now_s: float) -> None:
        # A policy may propose without end: one for each page and some nonsense is all it gets.
        limit = len(self._rows) + _NONSENSE_LIMIT
        try:
            choice.consider(islice(policy.victims(choice.missing_bytes, now_s), limit))
        except BaseException as error:
            if not is_own(error):
                raise
            self._failed("victims", error)

    def _failed(self, call: str, error: BaseException) -> None:
        """Count and log what a policy raised."""
        self.counts.failures += 1
        self._failures.tell(
            log,
            self._users,
            call,
            error,
            instead="`lru` decides instead",
            where=self._name,
            traces=True,
        )


def _past(uses: int, now_s: float) -> PageHistory | None:
    return PageHistory(uses, now_s, now_s) if uses else None


def _told_of_pins(policy: RetentionPolicy | None) -> SeesPins | None:
    """Return what to tell of pins: a user's policy that wants to know them, or what asks it."""
    return None if seeing_pins(behind(policy)) is None else seeing_pins(policy)

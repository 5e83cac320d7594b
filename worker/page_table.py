"""Which physical page holds which frozen page, and who uses it.

Covers the device tier's bookkeeping: matching leading runs, allocating, freezing, sharing and
evicting. Pure: no I/O, no clock, no memory of its own. Does not cover what lies in the pages
(`pie.worker.arena`) or one sequence's view of them (`pie.worker.working_set`).

A key names the whole sequence up to its page's end, so a dict from keys to pages is the prefix
tree: the longest match is the longest run of keys that it knows.

    free ──allocate──> writable ──freeze──> frozen, in use <──match, release──> frozen, idle
      ^                 │   ^                                                        │
      │              begin_load, end_load                                          evict
      └──release────────┴───┘                                                        │
      └──────────────────────────────────────────────────────────────────────────────┘

A page that was not computed purely is sealed rather than frozen: opaque, it has users and no key.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pie.page.events import Part, Tier
from pie.page.key import PageKey, RootKey
from pie.policies.hand_over import HandOver
from pie.policies.manager import RetentionManager
from pie.policies.retention import NO_ROOT, PageView, RetentionPolicy
from pie.worker.batch import PageSlot
from pie.worker.free_pages import FreePages

_LOOKED_AT = 64
"""How many victims more than needed are looked at for some that lie below already."""


class PageState(enum.Enum):
    """What a physical page is to the table. A frozen page is idle while it has no users."""

    FREE = "free"
    WRITABLE = "writable"
    LOADING = "loading"
    FROZEN = "frozen"
    OPAQUE = "opaque"
    """Full and immutable, without a key: whoever shares it has been given it."""


@dataclass(frozen=True, slots=True)
class FrozenPage:
    """What names a frozen page and its place in its sequence."""

    key: PageKey
    parent: bytes
    index: int
    tenant_tag: str = ""
    session_tag: str = ""


@dataclass(frozen=True, slots=True)
class Held:
    """A leading run of held pages."""

    pages: int
    idle: int
    """Those of them that nobody uses now."""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """How many pages are in each state."""

    free: int
    writable: int
    loading: int
    idle: int
    in_use: int
    opaque: int


@dataclass(slots=True)
class Change:
    """A page that is now held (`stored`) or no longer is."""

    page: FrozenPage
    stored: bool
    is_state: bool = False
    """Whether it is the page's snapshot of recurrent states, or else its attention parts."""


@dataclass(slots=True)
class _Page:
    state: PageState = PageState.FREE
    users: int = 0
    frozen: FrozenPage | None = None


class Below(Protocol):
    """What takes pages that leave."""

    @property
    def waiting(self) -> int:
        """How many pages wait to be copied there."""
        ...

    def holds(self, key: PageKey) -> bool:
        """Say whether a page is there."""
        ...

    def demote(self, victims: Sequence[tuple[PageSlot, FrozenPage]]) -> None:
        """Learn which pages leave now, while they still lie where they did."""

    def keep(self, uses: Mapping[PageKey, int]) -> None:
        """Learn which pages were used just now that rules want to outlive a restart.

        With how often each was, where that is why; 0 where it is not.
        """


@dataclass
class PageTable:
    """The physical pages of one arena.

    Not thread-safe: it belongs to the step thread. Time comes in as `now_s`.

    Args:
        total: Physical pages.
        page_bytes: Size of one, all parts together.
        part: The part under which the retention policy knows a page. All attention parts of a page
            stay or leave together in device memory.
        retention: Chooses victims among idle pages.
        below: What is below device memory.
        model_root: Of the model whose pages they are, for policies.
        page_tokens: Tokens in a page of that, for policies; 0 where it is not known.
    """

    total: int
    page_bytes: int
    part: Part
    retention: RetentionManager
    below: Below | None = None
    model_root: RootKey = NO_ROOT
    page_tokens: int = 0
    evicted: int = field(init=False, default=0)
    """Pages that left for others."""
    _pages: list[_Page] = field(init=False)
    _free: FreePages = field(init=False)
    _by_key: dict[PageKey, PageSlot] = field(init=False, default_factory=dict)
    _counts: Counter[PageState] = field(init=False)
    _idle: int = field(init=False, default=0)
    _changes: list[Change] = field(init=False, default_factory=list)
    _opaque: list[PageKey] = field(init=False, default_factory=list)
    _handed_over: HandOver | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._pages = [_Page() for _ in range(self.total)]
        self._free = FreePages(self.total)
        self._counts = Counter({PageState.FREE: self.total})

    @property
    def available(self) -> int:
        """Pages that can be allocated: free ones, and idle ones that would be evicted."""
        return len(self._free) + self._idle

    def counts(self) -> PageCounts:
        """Return how many pages are in each state."""
        return PageCounts(
            free=self._counts[PageState.FREE],
            writable=self._counts[PageState.WRITABLE],
            loading=self._counts[PageState.LOADING],
            idle=self._idle,
            in_use=self._counts[PageState.FROZEN] - self._idle,
            opaque=self._counts[PageState.OPAQUE],
        )

    def matching(self, keys: Sequence[PageKey]) -> Held:
        """Return what is held of the leading run of `keys`, without any effect."""
        pages = idle = 0
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            pages += 1
            idle += not self._pages[page].users
        return Held(pages, idle)

    def match(self, keys: Sequence[PageKey], now_s: float) -> list[PageSlot]:
        """Return the pages of the longest leading run of `keys`, each with one more user."""
        pages = [self._by_key[key] for key in keys[: self.matching(keys).pages]]
        # From the end, so that a policy that goes by time gives up tails before what they need.
        for page in reversed(pages):
            frozen = self._frozen(page)
            self.retention.hit(frozen.key, self.part, now_s)
            self._use(page)
        if self.below is not None and self.retention.has_persistent:
            held = keys[: len(pages)]
            uses = ((key, self.retention.uses_to_keep(key, self.part)) for key in held)
            self.below.keep({key: count for key, count in uses if count is not None})
        return pages

    def holds(self, page: PageSlot, key: PageKey) -> bool:
        """Say whether `page` is frozen under `key` now."""
        return self._by_key.get(key) == page

    def has(self, key: PageKey) -> bool:
        """Say whether any page is frozen under `key` now."""
        return key in self._by_key

    def slot_of(self, key: PageKey) -> PageSlot | None:
        """Return the page that is frozen under `key`; None where there is none."""
        return self._by_key.get(key)

    def frozen(self, page: PageSlot) -> FrozenPage:
        """Return what names a frozen page."""
        return self._frozen(page)

    def frozen_pages(self) -> list[FrozenPage]:
        """Return what names all frozen pages, in the order in which they came."""
        return [self._frozen(slot) for slot in self._by_key.values()]

    def let_go(self, key: PageKey) -> bool:
        """Free the page under `key` unless somebody uses it; say whether it is not held any more."""
        slot = self._by_key.get(key)
        if slot is None:
            return True
        if self._pages[slot].users:
            return False
        self._free_idle(key)
        return True

    def acquire(self, page: PageSlot, count: int = 1) -> None:
        """Add users to a frozen or opaque page."""
        if self._pages[page].state is PageState.OPAQUE:
            self._pages[page].users += count
            return
        self._frozen(page)
        self._use(page, count)

    def allocate(
        self, count: int, now_s: float, *, after: PageSlot | None = None
    ) -> list[PageSlot] | None:
        """Take `count` writable pages, evicting idle ones if need be.

        Returns None, and changes nothing, where there are not so many. `after` asks for pages
        beside that one.
        """
        if count > self.available:
            return None
        missing = count - len(self._free)
        if missing > 0 and not self._evict(missing, now_s):
            return None
        pages = self._free.take(count, after=after)
        for page in pages:
            self._set(page, PageState.WRITABLE)
            self._pages[page].users = 1
        return pages

    def freeze(self, page: PageSlot, frozen: FrozenPage, now_s: float) -> PageSlot:
        """Name a full writable page and return the page that holds the key from now on.

        Where another page holds it already, the caller becomes a user of that one and `page` is
        freed.
        """
        assert self._pages[page].state is PageState.WRITABLE, "only a writable page can be frozen"
        held = self._by_key.get(frozen.key)
        if held is not None:
            self._discard(page)
            self._use(held)
            return held
        self._set(page, PageState.FROZEN)
        self._pages[page].frozen = frozen
        self._by_key[frozen.key] = page
        self.retention.stored(self._view(frozen), now_s)
        self.retention.pin(frozen.key, self.part)
        self._changes.append(Change(frozen, True, self.part is Part.STATE))
        return page

    def seal(self, page: PageSlot) -> None:
        """Make a full writable page immutable without a name: it is free once nobody uses it."""
        assert self._pages[page].state is PageState.WRITABLE, "only a writable page can be sealed"
        self._set(page, PageState.OPAQUE)

    def begin_load(self, pages: Iterable[PageSlot]) -> None:
        """Mark writable pages as being written by a load: they cannot be released meanwhile."""
        for page in pages:
            assert self._pages[page].state is PageState.WRITABLE
            self._set(page, PageState.LOADING)

    def end_load(self, pages: Iterable[PageSlot]) -> None:
        """Make pages whose load has ended, well or badly, writable again."""
        for page in pages:
            assert self._pages[page].state is PageState.LOADING
            self._set(page, PageState.WRITABLE)

    def release(self, pages: Sequence[PageSlot]) -> None:
        """Take one user from each page. A writable page becomes free, a frozen one stays."""
        for page in reversed(pages):
            state = self._pages[page].state
            assert state is not PageState.LOADING, "a page cannot go while a load writes it"
            if state is PageState.OPAQUE and self._pages[page].users > 1:
                self._pages[page].users -= 1
                continue
            if state in (PageState.WRITABLE, PageState.OPAQUE):
                self._discard(page)
                continue
            frozen = self._frozen(page)
            entry = self._pages[page]
            assert entry.users > 0, f"page {page} released too often"
            entry.users -= 1
            if not entry.users:
                self._idle += 1
                self.retention.unpin(frozen.key, self.part)

    def begin_replace(self, policy: RetentionPolicy) -> HandOver:
        """Begin to let another policy choose victims; `move_over` goes on with it.

        Returns:
            The pages, to be put in order first, on any thread.
        """
        self._handed_over = self.retention.begin_replace(policy)
        return self._handed_over

    def abandon_replace(self) -> None:
        """Let the policy that chooses victims go on doing so."""
        self._handed_over = None
        self.retention.abandon_replace()

    def move_over(self, most: int, now_s: float) -> bool:
        """Hand some pages to the policy that takes over; say whether it answers now."""
        assert self._handed_over is not None, "nobody takes over"
        if pages := self._handed_over.take(most):
            for key, _ in pages:
                slot = self._by_key.get(key)
                if slot is not None:
                    self.retention.move_over(self._view(self._frozen(slot)), now_s)
            return False
        self._handed_over = None
        self.retention.end_replace()
        return True

    def take_changes(self) -> list[Change]:
        """Return what was stored and removed since the last call, in order."""
        changes, self._changes = self._changes, []
        return changes

    def note_opaque(self, keys: Iterable[PageKey]) -> None:
        """Note the keys of pages that will have none, because a pass over them was not pure."""
        self._opaque += keys

    def take_opaque(self) -> list[PageKey]:
        """Return what was noted since the last call."""
        opaque, self._opaque = self._opaque, []
        return opaque

    def check(self, users: Iterable[Sequence[PageSlot]] | None = None) -> None:
        """Raise `AssertionError` where the table contradicts itself.

        Args:
            users: The pages of every user, where the caller knows them all: then each page's count
                must be right too.
        """
        self._free.check()
        self.retention.check()
        states = Counter(page.state for page in self._pages)
        assert all(states[state] == self._counts[state] for state in PageState)
        assert len(self._free) == states[PageState.FREE]
        idle = 0
        for number, page in enumerate(self._pages):
            assert (page.state is PageState.FREE) == (number in self._free)
            assert (page.state is PageState.FROZEN) == (page.frozen is not None)
            if page.frozen is not None:
                assert self._by_key.get(page.frozen.key) == number
                idle += not page.users
            elif page.state is PageState.OPAQUE:
                assert page.users > 0
            else:
                assert page.users == (page.state is not PageState.FREE)
        assert idle == self._idle
        assert len(self._by_key) == states[PageState.FROZEN]
        if users is not None:
            counted = Counter(page for pages in users for page in pages)
            for number, page in enumerate(self._pages):
                assert page.users == counted[number], f"page {number} has {page.users} users"

    def _evict(self, count: int, now_s: float) -> bool:
        victims = self._victims(count, now_s)
        if len(victims) < count:
            return False
        if self.below is not None:
            slots = [self._by_key[key] for key in victims]
            self.below.demote([(slot, self._frozen(slot)) for slot in slots])
        for key in victims:
            self._free_idle(key)
        self.evicted += len(victims)
        return True

    def _free_idle(self, key: PageKey) -> None:
        page = self._by_key.pop(key)
        entry = self._pages[page]
        assert not entry.users, "a page in use was chosen to leave"
        assert entry.frozen is not None
        self._changes.append(Change(entry.frozen, False, self.part is Part.STATE))
        entry.frozen = None
        self._idle -= 1
        self._set(page, PageState.FREE)
        self._free.give((page,))
        self.retention.removed(key, self.part)

    def _victims(self, count: int, now_s: float) -> list[PageKey]:
        """Return up to `count` pages to evict.

        While pages wait to be copied below, those that are there already leave before them: a
        policy gives up the end of a sequence first, which is copied last.
        """
        below = self.below
        # To look at all that is idle would take 89 ms of a step where 20,000 pages are in use.
        waiting = 0 if below is None else min(below.waiting, self._idle - count, _LOOKED_AT)
        victims = self.retention.victims((count + waiting) * self.page_bytes, now_s)
        keys = [key for key, _ in victims]
        if below is not None and len(keys) > count:
            keys = self._those_below_first(keys, below)
        return keys[:count]

    def _those_below_first(self, victims: Sequence[PageKey], below: Below) -> list[PageKey]:
        """Return victims, each of which comes after those that need it, in the order in which they leave.

        What lies below and leaves nothing behind comes first. Then what lies below though a page that needs it
        stays: it can be loaded again, while that one would be lost.
        """
        copied: list[PageKey] = []
        needed: list[PageKey] = []
        others: list[PageKey] = []
        parents: set[bytes] = set()
        for key in victims:
            is_below = below.holds(key)
            if is_below and key not in parents:
                copied.append(key)
                continue
            (needed if is_below else others).append(key)
            parents.add(self._frozen(self._by_key[key]).parent)
        return copied + needed + others

    def _view(self, frozen: FrozenPage) -> PageView:
        return PageView(
            key=frozen.key,
            parent=frozen.parent,
            index=frozen.index,
            part=self.part,
            tier=Tier.DEVICE,
            bytes=self.page_bytes,
            tenant_tag=frozen.tenant_tag,
            session_tag=frozen.session_tag,
            model_root=self.model_root,
            page_tokens=self.page_tokens,
        )

    def _use(self, page: PageSlot, count: int = 1) -> None:
        entry = self._pages[page]
        if not entry.users:
            self._idle -= 1
            self.retention.pin(self._frozen(page).key, self.part)
        entry.users += count

    def _discard(self, page: PageSlot) -> None:
        assert self._pages[page].users == 1
        self._pages[page].users = 0
        self._set(page, PageState.FREE)
        self._free.give((page,))

    def _set(self, page: PageSlot, state: PageState) -> None:
        entry = self._pages[page]
        self._counts[entry.state] -= 1
        self._counts[state] += 1
        entry.state = state

    def _frozen(self, page: PageSlot) -> FrozenPage:
        frozen = self._pages[page].frozen
        assert frozen is not None, f"page {page} is not frozen"
        return frozen

"""Where conversations are, and which pages they have, as one router knows it.

Covers what is remembered of each, bounded. Pure, with time as a parameter. Does not cover which worker a request
goes to (`pie.router.choice`) or what is done about conversations (`pie.router.conductor`).
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from pie.page.events import PlaceId
from pie.page.key import PageKey, RootKey
from pie.policies.order_limits import MOST_SEQUENCE_PAGES

_MOST = 65_536
"""Conversations of which it is remembered where they are: the latest ones, some 10 MB."""
_MOST_PAGES = 262_144
"""Pages of all of them whose keys are remembered, some 25 MB; the ones used longest ago are forgotten."""

ConversationKey = tuple[str | None, str]
"""A conversation's salt, and what its client calls it."""


@dataclass(eq=False, slots=True)
class Conversation:
    """One conversation."""

    place: PlaceId
    """The worker that has it."""
    came_from: PlaceId | None = None
    """The worker that had it before."""
    moved_at_s: float = 0.0
    used_s: float = 0.0
    """When its latest request came, or its answer was over."""
    running: int = 0
    root: RootKey | None = None
    """Of the model that its pages are of."""
    keys: Sequence[PageKey] = ()
    """Its pages, from the first one on."""
    tag: str = ""
    tenant_tag: str = ""

    def move(self, place: PlaceId, now_s: float) -> None:
        """Learn that another worker has it."""
        if place != self.place:
            self.came_from, self.place, self.moved_at_s = self.place, place, now_s


class Conversations:
    """The latest conversations. For one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[ConversationKey, Conversation] = OrderedDict()
        self._paged: OrderedDict[ConversationKey, Conversation] = OrderedDict()
        """Those of which pages are known."""
        self._users: Counter[PageKey] = Counter()
        """How many conversations have a page."""
        self._tags: dict[str, ConversationKey] = {}

    def __len__(self) -> int:
        return len(self._known)

    def place_of(self, key: ConversationKey) -> PlaceId | None:
        """Return the worker that has a conversation; None where it is not known."""
        found = self._known.get(key)
        return None if found is None else found.place

    def began(
        self,
        key: ConversationKey,
        place: PlaceId,
        root: RootKey,
        keys: Sequence[PageKey],
        now_s: float,
    ) -> None:
        """Learn where a request of a conversation went, and which pages its prompt has."""
        one = self._known.get(key)
        if one is None:
            one = self._known[key] = Conversation(place)
        self._known.move_to_end(key)
        one.move(place, now_s)
        one.used_s = now_s
        self._set_keys(key, one, root, keys)
        while len(self._known) > _MOST:
            self.forget(next(iter(self._known)))
        while len(self._users) > _MOST_PAGES:
            other, gone = next(iter(self._paged.items()))
            self._set_keys(other, gone, None, ())

    def named(self, key: ConversationKey, tag: str, tenant_tag: str) -> None:
        """Learn which tags a conversation's pages have, and that a request of it runs."""
        one = self._known.get(key)
        if one is None:
            return
        if one.tag != tag:
            self._tags.pop(one.tag, None)
        one.tag, one.tenant_tag = tag, tenant_tag
        one.running += 1
        self._tags[tag] = key

    def forget(self, key: ConversationKey) -> None:
        """Forget a conversation that nobody can go on with."""
        one = self._known.pop(key, None)
        if one is not None:
            self._set_keys(key, one, None, ())
            self._tags.pop(one.tag, None)

    def ended(self, key: ConversationKey, keys: Sequence[PageKey], now_s: float) -> None:
        """Learn that a request is over, and which pages the conversation has with its answer."""
        one = self._known.get(key)
        if one is None:
            return
        one.running = max(0, one.running - 1)
        one.used_s = now_s
        if one.root is not None and len(keys) > len(one.keys):
            self._set_keys(key, one, one.root, keys)

    def move(self, tag: str, place: PlaceId, now_s: float) -> bool:
        """Let another worker have a conversation; say whether it is known."""
        key = self._tags.get(tag)
        one = None if key is None else self._known.get(key)
        if one is None:
            return False
        one.move(place, now_s)
        return True

    def latest(self, most: int) -> Iterator[Conversation]:
        """Yield the conversations used last of which pages are known, the latest first."""
        return islice((one for one in reversed(self._paged.values()) if one.tag), most)

    def shared_pages(self, one: Conversation) -> int:
        """Return how many leading pages another conversation has too."""
        # Who has a page has those before it, so that the first one that is not shared is found by bisection.
        return bisect.bisect_left(one.keys, True, key=lambda key: self._users[key] < 2)

    def _set_keys(
        self,
        key: ConversationKey,
        one: Conversation,
        root: RootKey | None,
        keys: Sequence[PageKey],
    ) -> None:
        before, after = one.keys, tuple(keys[:MOST_SEQUENCE_PAGES])
        same = _common(before, after)
        self._users.update(after[same:])
        for page in before[same:]:
            if self._users[page] > 1:
                self._users[page] -= 1
            else:
                del self._users[page]
        one.root, one.keys = root, after
        if after:
            self._paged[key] = one
            self._paged.move_to_end(key)
        else:
            self._paged.pop(key, None)


def _common(ours: Sequence[PageKey], others: Sequence[PageKey]) -> int:
    """Return how many leading pages two sequences share: a key names all before it, so bisection tells."""
    pages = range(min(len(ours), len(others)))
    return bisect.bisect_left(pages, True, key=lambda at: ours[at] != others[at])

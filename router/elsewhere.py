"""What other routers see, beside what this one does.

Covers putting together what is asked for and where conversations are, each of which several routers may know. Pure.
Does not cover how routers tell each other (`pie.index.router_views`) or what policies are shown
(`pie.router.overview`).
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pie.index.router_views import (
    MOST_CHAINS,
    MOST_GROUPS,
    MOST_SESSIONS,
    RouterView,
    SeenGroup,
    SeenSession,
)
from pie.page.key import PageKey, RootKey
from pie.router.conversations import Conversation, Conversations
from pie.router.demand import Demand, Holder

_LEAST_USES_PER_S = 0.01
"""Less than one prompt in a minute and a half is not told."""
_AT_ONCE = 256
"""Conversations that are gone through before others may have their turn: half a millisecond."""


@dataclass(eq=False, slots=True)
class Told(Conversation):
    """A conversation as another router knows it."""

    shared: int = 0
    """Leading pages that another one of that router has too."""


class Elsewhere:
    """What all other routers together see."""

    def __init__(self) -> None:
        self._uses: dict[PageKey, float] = {}
        self._holders: dict[PageKey, Holder] = {}
        self._conversations: list[Told] = []
        """The one used last in front."""
        self._all = Conversations()
        """Those of all routers, this one's too, each once."""

    def learn(self, views: Mapping[str, RouterView], now_s: float) -> None:
        """Learn what they say now, instead of what they said before."""
        if not views:
            self._all = Conversations()
        self._uses, self._holders = {}, {}
        hottest: dict[PageKey, float] = {}
        for view in views.values():
            for one in view.groups:
                group = one.group
                self._uses[group] = self._uses.get(group, 0.0) + one.uses_per_s
                if one.chain and one.uses_per_s > hottest.get(group, 0.0):
                    hottest[group] = one.uses_per_s
                    self._holders[group] = Holder(
                        one.chain, one.model_root, one.tenant_tag, one.session_tag, one.root
                    )
        conversations = (
            Told(
                one.place,
                one.came_from,
                now_s - one.moved_s,
                now_s - one.used_s,
                int(one.is_running),
                RootKey(one.model_root),
                one.pages,
                one.tag,
                one.tenant_tag,
                one.shared,
            )
            for view in views.values()
            for one in view.sessions
        )
        self._conversations = sorted(conversations, key=_latest_first)

    @property
    def groups(self) -> Iterable[PageKey]:
        """Groups that are asked for elsewhere."""
        return self._uses

    def uses_per_s(self, group: PageKey) -> float:
        """Return how often a group is used elsewhere."""
        return self._uses.get(group, 0.0)

    def holder(self, group: PageKey) -> Holder | None:
        """Return a prompt elsewhere that holds a group, where that is known."""
        return self._holders.get(group)

    def with_own(
        self, own: Iterable[Conversation], most: int
    ) -> Generator[None, None, list[Conversation]]:
        """Return conversations of all routers, the one used last in front; yield wherever others may have their turn.

        Of one that several routers know the one that had it last is right, where it was before is what another
        one says, and it runs where it runs at any of them.
        """
        if not self._conversations:
            return list(own)[:most]
        latest: dict[str, Conversation] = {}
        mine = sorted(own, key=_latest_first)
        for number, one in enumerate(heapq.merge(mine, self._conversations, key=_latest_first)):
            if number % _AT_ONCE == 0:
                yield
            newer = latest.get(one.tag)
            if newer is None:
                latest[one.tag] = one
                continue
            if one.running:
                newer = replace(newer, running=newer.running + one.running)
            if newer.came_from is None and newer.place != one.place:
                newer = replace(newer, came_from=one.place, moved_at_s=newer.used_s)
            latest[one.tag] = newer
        return list(latest.values())[:most]

    def note(self, one: Conversation, now_s: float) -> None:
        """Note the pages of a conversation of any router, for `shared_pages` of others."""
        if self._conversations and one.root is not None:
            self._all.began((None, one.tag), one.place, one.root, one.keys, now_s)

    def shared_pages(self, one: Conversation) -> int:
        """Return how many leading pages of a conversation another one that was noted has too."""
        if not self._conversations:
            return 0
        told = one.shared if isinstance(one, Told) else 0
        return max(told, self._all.shared_pages(one))


def _latest_first(one: Conversation) -> float:
    return -one.used_s


def seen(demand: Demand, conversations: Conversations, now_s: float) -> RouterView:
    """Return what this router tells others."""
    return RouterView(
        _groups(demand, now_s),
        [
            SeenSession(
                one.tag,
                one.place,
                one.keys,
                max(0.0, now_s - one.used_s),
                bool(one.running),
                one.came_from,
                now_s - one.moved_at_s,
                conversations.shared_pages(one),
                one.root or b"",
                one.tenant_tag,
            )
            for one in conversations.latest(MOST_SESSIONS)
        ],
    )


def _groups(demand: Demand, now_s: float) -> Sequence[SeenGroup]:
    groups = []
    chains = 0
    for group in demand.hottest()[:MOST_GROUPS]:
        uses_per_s = demand.uses_per_s(group, now_s)
        if uses_per_s < _LEAST_USES_PER_S:
            break
        holder = demand.holder(group) if chains < MOST_CHAINS else None
        if holder is None:
            groups.append(SeenGroup(group, uses_per_s))
            continue
        chains += 1
        groups.append(
            SeenGroup(
                group,
                uses_per_s,
                holder.chain,
                holder.model_root,
                holder.tenant_tag,
                holder.session_tag,
                holder.root,
            )
        )
    return groups

"""`replicate-hot`: more copies of what is asked for most, and fewer when it cools.

Covers one built-in cluster policy. A group of pages that prompts use more than `uses` times a second for
each of its copies gets another copy, up to `copies`; one whose uses have stayed below `cool` of that for
`after` gives one back. Between the two nothing changes, so that a group at the edge does not come and go.

Workers alike, where `workers` says so: a prompt's pages up to a group that is used more than `worker_uses` times a
second for each worker that has them are brought near as many more as that takes, before the first drowns; what was
brought so is let go of when it cools, but for the groups at its beginning that are hot still. Both are ordered in every
round until they are done: the manager gives no order twice, and one that it refuses for now has its turn later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from pie.page.events import PlaceId
from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    GroupView,
    LetGo,
    Order,
    SetCopies,
)
from pie.policies.units import Positive, Seconds, Share

_MOST_COPIES = 64
_LEAVES_S = 30.0
"""How long pages are told to leave at most: requests may have brought them back, and nobody may know."""


class ReplicateHot:
    """More copies of what is asked for most.

    Args:
        uses: Uses a second that one copy bears.
        copies: Most copies of a group.
        cool: Below this share of what it bears a group gives a copy back.
        after: How long it must have been so.
        workers: Most workers that a hot prompt's pages are brought to; 1 leaves that to routing.
        worker_uses: Uses a second that one worker bears.
    """

    def __init__(
        self,
        uses: Positive = 5.0,
        copies: Annotated[int, Field(ge=2, le=_MOST_COPIES)] = 3,
        cool: Share = 0.5,
        after: Seconds = 30.0,
        workers: Annotated[int, Field(ge=1, le=_MOST_COPIES)] = 1,
        worker_uses: Positive = 10.0,
    ) -> None:
        self._uses = uses
        self._copies = copies
        self._cool = cool
        self._after_s = after
        self._workers = workers
        self._worker_uses = worker_uses
        self._cool_since: dict[PageKey, float] = {}
        self._brought: dict[PageKey, _Brought] = {}

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return an order for each group that is too hot or has been cool for long enough."""
        most = min(self._copies, view.nodes)
        orders: list[Order] = []
        cooling: dict[PageKey, float] = {}
        for one in view.groups:
            borne = self._uses * one.copies
            if one.uses_per_s > borne and one.copies < most:
                # As many as it takes at once: a stampede does not wait.
                wanted = min(most, int(one.uses_per_s / self._uses) + 1)
                reason = f"{one.uses_per_s:.1f} uses a second, more than {borne:g}"
                orders.append(SetCopies(one.group, wanted, reason))
            elif one.copies > view.least_copies:
                left = self._cool * self._uses * (one.copies - 1)
                if one.uses_per_s >= left:
                    continue
                since_s = cooling[one.group] = self._cool_since.get(one.group, view.now_s)
                if view.now_s - since_s >= self._after_s:
                    cooling[one.group] = view.now_s
                    reason = f"{one.uses_per_s:.1f} uses a second, less than {left:g}"
                    orders.append(SetCopies(one.group, one.copies - 1, reason))
        self._cool_since = cooling
        if self._workers > 1:
            for one in self._whole(view.groups):
                orders += self._to_workers(one, view)
        if self._brought:
            orders += self._cooled(view)
        return orders

    def _wanted(self, one: GroupView) -> int:
        """Return how many workers should have a prompt's pages."""
        return min(self._workers, int(one.uses_per_s / self._worker_uses) + 1)

    def _whole(self, groups: Sequence[GroupView]) -> list[GroupView]:
        """Return groups that more workers should have, each with all before it; not what another one includes."""
        hot = [
            one
            for one in groups
            if one.chain
            and one.workers is not None
            and self._wanted(one) > max(1, len(one.workers))
        ]
        before = {key for one in hot for key in one.chain[::GROUP_PAGES] if key != one.group}
        return [one for one in hot if one.group not in before]

    def _to_workers(self, one: GroupView, view: ClusterView) -> list[Order]:
        """Return orders that bring a hot prompt's pages near as many more workers as it takes."""
        has = set(one.workers or ())
        others = [w for w in view.workers(one.model_root) if w.place not in has and w.has_host]
        if not others:
            return []
        brought = self._brought.setdefault(one.group, _Brought(one.chain))
        brought.stay()
        borne = self._worker_uses * max(1, len(has))
        reason = f"{one.uses_per_s:.1f} uses a second, more than {borne:g} at {len(has)} workers"
        orders: list[Order] = []
        # Those that were told to are first, so that no further ones are told while pages are on their way.
        others.sort(key=lambda worker: worker.place not in brought.places)
        for worker in others[: self._wanted(one) - max(1, len(has))]:
            if worker.place not in brought.places:
                brought.places.append(worker.place)
            orders.append(FetchPages(worker.place, one.chain, reason))
        return orders

    def _cooled(self, view: ClusterView) -> Iterator[Order]:
        """Yield orders that let workers go of what was brought near them and has been cool for long enough."""
        shown = {one.group: one for one in view.groups}
        up = {one.place for one in view.places}
        hot = [
            one.chain or (one.group,) for one in view.groups if one.uses_per_s >= self._left(one)
        ]
        needed = {key for chain in hot for key in chain[::GROUP_PAGES]}
        for group, brought in list(self._brought.items()):
            brought.places = [place for place in brought.places if place in up]
            if self._is_going(brought, shown.get(group), view.now_s):
                # What comes first may be hot still.
                start = brought.first_but(needed | self._brought_too(brought.places[-1]))
                left = self._left(shown.get(group), brought)
                uses_per_s = 0.0 if group not in shown else shown[group].uses_per_s
                reason = f"{uses_per_s:.1f} uses a second, less than {left:g}"
                yield LetGo(brought.places[-1], brought.chain, reason, start=start)
            elif not brought.places:
                del self._brought[group]

    def _is_going(self, brought: _Brought, one: GroupView | None, now_s: float) -> bool:
        """Say whether the place that pages were brought to last is to let go of them."""
        if not brought.places:
            return False
        if one is not None and one.uses_per_s >= self._left(one, brought):
            brought.stay()
            return False
        if brought.cool_since_s is None:
            brought.cool_since_s = now_s
        if brought.going_since_s is None:
            if now_s - brought.cool_since_s < self._after_s:
                return False
            brought.going_since_s, brought.was_there = now_s, False
        workers = None if one is None else one.workers
        is_there = workers is not None and brought.places[-1] in workers
        has_left = workers is not None and brought.was_there and not is_there
        brought.was_there |= is_there
        if has_left or now_s - brought.going_since_s >= _LEAVES_S:
            # The next place has its turn when this one's has lasted for as long.
            brought.cool_since_s, brought.going_since_s = brought.going_since_s, None
            brought.places.pop()
            return False
        return True

    def _left(self, one: GroupView | None, brought: _Brought | None = None) -> float:
        """Return how many uses a second of a group are so few that one worker fewer may have it."""
        if one is not None and one.workers is not None:
            workers = len(one.workers)
        else:
            # One had it before it was brought near others.
            workers = 1 + (0 if brought is None else len(brought.places))
        return self._cool * self._worker_uses * (max(2, workers) - 1)

    def _brought_too(self, place: PlaceId) -> Set[PageKey]:
        """Return the first pages of groups that were brought to a place and are to stay there."""
        return {
            key
            for other in self._brought.values()
            if other.going_since_s is None and place in other.places
            for key in other.chain[::GROUP_PAGES]
        }


@dataclass(slots=True)
class _Brought:
    """Pages that were brought near workers because they were hot."""

    chain: Sequence[PageKey]
    places: list[PlaceId] = field(default_factory=list)
    """The latest last."""
    cool_since_s: float | None = None
    going_since_s: float | None = None
    """Since when the latest place is told to let go of them; None where it is not."""
    was_there: bool = False
    """Whether it had them all at some time since."""

    def stay(self) -> None:
        """Learn that they are hot."""
        self.cool_since_s = self.going_since_s = None

    def first_but(self, needed: Set[PageKey]) -> int:
        """Return where the first group begins of which the first page is not needed; else the last group."""
        firsts = self.chain[::GROUP_PAGES]
        at = next((at for at, key in enumerate(firsts) if key not in needed), len(firsts) - 1)
        return at * GROUP_PAGES

"""The manager of cluster policies: they propose, it disposes.

Covers which orders are carried out, what is refused, and containing a policy that fails; pure. Each comes
back with its reason, for the log of events. Does not cover carrying orders out (`pie.router.conductor`)
or how many copies several policies want together (`pie.policies.wishes`).

What a policy cannot break: no group has fewer copies than the configuration says (so no last copy goes) or
more than there are nodes; no more than `MOST_RAISED` groups have more copies than that, and no more than
`MOST_AT_ONCE` groups change at a time. How many workers a model should have is a hint, which starts and
stops nobody. Pages move within the limits of `pie.policies.order_limits`; a worker lets go of
what the pool has, a pool node of what a worker has, never both at a time, and of the last copy only for a policy
that says so. An order that was given is not given again for a while. Who
has pages is looked up for no order that is refused without, and for `MOST_IN_VAIN` that are refused after: the
rest of them come first in the next rounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from pie.page.events import PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_policy import (
    ClusterPolicy,
    ClusterView,
    FetchPages,
    LetGo,
    MoveSession,
    Order,
    SetCopies,
    StorePages,
    Wanted,
    WantWorkers,
    apart,
)
from pie.policies.containing import is_builtin, is_own
from pie.policies.order_checks import (
    Holders,
    PageOrder,
    bad_copies,
    bad_hint,
    bad_move,
    bad_pages,
    looked_up,
)
from pie.policies.order_limits import BYTES_PER_S, MOST_MOVES, MOST_ORDERS, MOST_PAGES
from pie.policies.proposed_orders import kept, order_of
from pie.policies.remembered import Leaving, Remembered
from pie.policies.telling import told

log = logging.getLogger("pie.policies.cluster_manager")

MOST_RAISED = 512
"""Groups with more copies than usual: every place keeps the list."""
MOST_AT_ONCE = 32
MOST_IN_VAIN = 32
"""Orders of a round that are refused for what a look at the index told: each look takes some milliseconds."""
_MOST_PROPOSALS = 4_096
_MOST_REASONS = 16
"""Of one policy that are told within `QUIET_S`, for a thousand events are kept: a reason may name what only one order is about."""
_ACTIONS: Mapping[type[object], str] = {
    StorePages: "store",
    FetchPages: "fetch",
    LetGo: "let-go",
    MoveSession: "move",
}


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """What was ordered, and what became of it."""

    policy: str
    action: str
    """`raise`, `lower`, `store`, `fetch`, `let-go`, `move`, `hint`, `lapse`, `done`, `refuse` or `fail`."""
    group: PageKey | None
    copies: int
    reason: str
    place: str = ""
    """Of orders about pages and conversations: where."""
    pages: int = 0
    model: str = ""
    """Of a hint, and of one that lapses: whose workers it is about."""
    workers: int = 0
    """Of a hint: how many it should have."""

    def __post_init__(self) -> None:
        """Make texts what can be kept, whatever a policy says: short, and of characters that UTF-8 has."""
        for name in ("policy", "reason", "place", "model"):
            object.__setattr__(self, name, kept(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Given:
    """An order about pages or a conversation that is to be carried out, and whose it is."""

    policy: str
    order: PageOrder | MoveSession


@dataclass(slots=True)
class Decision:
    """What a round comes to."""

    table: dict[PageKey, int]
    """Groups with more copies than usual, as it is to be."""
    remembered: Remembered = field(repr=False, compare=False)
    """What the next rounds go by, once this one is kept."""
    given: list[Given] = field(default_factory=list)
    events: list[ClusterEvent] = field(default_factory=list)
    wanted: dict[str, Wanted] = field(default_factory=dict)
    """How many workers models should have."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What one policy proposed, and how it failed where it did."""

    number: int
    orders: Sequence[Order] = ()
    failures: Sequence[str] = ()


@dataclass(slots=True)
class _Round:
    """One round: what is known in it, and what has come of it so far."""

    view: ClusterView
    holders: Holders
    decision: Decision
    changed: set[tuple[int, PageKey]] = field(default_factory=set)
    refused: dict[tuple[object, ...], tuple[ClusterEvent, str, int]] = field(default_factory=dict)
    """By policy, kind of order and reason: the first event, what its order said, and how many there were."""
    orders: int = 0
    moves: int = 0
    """How many orders about pages, and how many moves, were given."""
    in_vain: int = 0
    slowed: set[int] = field(default_factory=set)
    """Policies of which an order has to wait until more bytes may move, and all later ones with it."""


class ClusterManager:
    """Asks policies, and keeps the table of copies.

    Args:
        policies: Who proposes, with what events call them; where several do, the first is heard first.
        bytes_per_s: How much orders may move in the whole cluster.
    """

    def __init__(
        self, policies: Sequence[tuple[str, ClusterPolicy]], *, bytes_per_s: int = BYTES_PER_S
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._too_fast = f"pages move at {bytes_per_s / (1 << 20):g} MiB a second at most"
        self._names = [name for name, _ in policies]
        self._policies = [policy for _, policy in policies]
        self._remembered = Remembered(self._policies, bytes_per_s=bytes_per_s)

    @property
    def names(self) -> Sequence[str]:
        """What the policies are called."""
        return self._names

    @property
    def failures(self) -> Sequence[int]:
        """How often each policy has failed."""
        return self._remembered.failures

    def go_on_from(self, other: ClusterManager) -> None:
        """Go by what another one has given: its orders are on their way, and its bytes move."""
        self._remembered.go_on_from(other._remembered)

    def inherit(self, table: Mapping[PageKey, int]) -> None:
        """Learn of copies that an earlier leader ordered, or other policies than these."""
        self._remembered.wishes.inherit(table)

    def shown(self, number: int, view: ClusterView) -> ClusterView:
        """Return what one policy is shown: of copies those that it has ordered itself."""
        own = self._remembered.wishes.of(number)
        if not own and all(one.copies == view.least_copies for one in view.groups):
            return view
        groups = [
            replace(one, copies=max(view.least_copies, own.get(one.group, 0)))
            for one in view.groups
        ]
        return replace(view, groups=groups)

    def ask(self, number: int, view: ClusterView) -> Asked:
        """Ask one policy. Changes nothing here, so that it may run on a thread of its own."""
        policy = self._policies[number]
        shown = view if is_builtin(policy) else apart(view)
        try:
            proposed = list(islice(policy.decide(shown), _MOST_PROPOSALS))
        except BaseException as error:
            if not is_own(error):
                raise
            return Asked(number, failures=(kept(told(error)),))
        good = [order for one in proposed if (order := order_of(one)) is not None]
        failures = []
        if len(good) < len(proposed):
            failures.append(f"{len(proposed) - len(good)} proposals are no orders")
        return Asked(number, good, failures)

    def disposing(
        self,
        asked: Iterable[Asked],
        view: ClusterView,
        table: Mapping[PageKey, int],
        holders: Holders,
    ) -> Generator[None, None, Decision]:
        """Return what comes of proposals, and yield after each: all of them may take long.

        Nothing of it is remembered before `keep`, so that a round that is dropped leaves no trace.

        Args:
            asked: What each policy proposed.
            view: What the cluster looks like.
            table: Groups with more copies than usual, as is in force.
            holders: Who has pages.
        """
        remembered = self._remembered.copy()
        now = _Round(view, holders, Decision(dict(table), remembered))
        remembered.begin(view.now_s)
        remembered.hints.begin(view.wanted, view.now_s)
        for one in asked:
            for reason in one.failures:
                self._failed(one.number, reason, now.decision)
            # What was looked up in vain comes after all else, what was longest ago first.
            in_turn = sorted(
                one.orders, key=lambda order: remembered.in_vain.get(_key(order), -math.inf)
            )
            for order in in_turn:
                if isinstance(order, SetCopies):
                    self._set_copies(one.number, order, now)
                elif isinstance(order, WantWorkers):
                    self._want(one.number, order, now)
                else:
                    self._give(one.number, order, now)
                yield
        decision = now.decision
        for group, wanted in islice(
            remembered.wishes.unwanted(decision.table).items(), MOST_AT_ONCE
        ):
            reason = f"no policy wants {decision.table.pop(group)} any more"
            if wanted:
                decision.table[group] = wanted
            copies = max(view.least_copies, wanted)
            decision.events.append(ClusterEvent("fixed", "lower", group, copies, reason))
        self._tell_refused(now)
        self._hint(view, decision)
        return decision

    def keep(self, decision: Decision) -> None:
        """Go by a round from now on: what it decided is in force, and its orders are on their way."""
        self._remembered = decision.remembered

    def _set_copies(self, number: int, order: SetCopies, now: _Round) -> None:
        view, decision, changed = now.view, now.decision, now.changed
        group, copies, table = order.group, order.copies, decision.table
        wishes = decision.remembered.wishes
        own = wishes.of(number).get(group, view.least_copies)
        refused = bad_copies(order, view)
        if not refused and copies == own:
            return
        if not refused and (number, group) in changed:
            refused = "the group was changed in this round already"
        if not refused and len({one for _, one in changed}) >= MOST_AT_ONCE:
            refused = f"{MOST_AT_ONCE} groups were changed in this round"
        if not refused and group not in table and len(table) >= MOST_RAISED:
            refused = f"{MOST_RAISED} groups have more copies already"
        if refused:
            self._refuse(number, order, refused, now)
            return
        changed.add((number, group))
        before = table.get(group, view.least_copies)
        wishes.set(number, group, copies if copies > view.least_copies else 0)
        after = max(view.least_copies, wishes.most(group))
        if after > view.least_copies:
            table[group] = after
        else:
            table.pop(group, None)
        if after != before:
            action = "raise" if after > before else "lower"
            event = ClusterEvent(self._names[number], action, group, after, order.reason)
            decision.events.append(event)

    def _want(self, number: int, order: WantWorkers, now: _Round) -> None:
        refused = bad_hint(order, now.view)
        if not refused:
            wanted = Wanted(order.workers, kept(order.reason), self._names[number])
            refused = now.decision.remembered.hints.say(order.model, wanted)
        if refused:
            self._refuse(number, order, refused, now)

    def _hint(self, view: ClusterView, decision: Decision) -> None:
        """End the round of hints."""
        changed, lapsed = decision.remembered.hints.end(view.now_s)
        for model, wanted in changed.items():
            event = ClusterEvent(
                wanted.policy, "hint", None, 0, wanted.reason, model=model, workers=wanted.workers
            )
            decision.events.append(event)
        for model, wanted in lapsed.items():
            reason = "no policy says any more how many workers it wants, and no hint holds"
            event = ClusterEvent(wanted.policy, "lapse", None, 0, reason, model=model)
            decision.events.append(event)
        decision.wanted = decision.remembered.hints.in_force()

    def _give(self, number: int, order: PageOrder | MoveSession, now: _Round) -> None:
        """Give an order, or refuse it; nothing where it was given just now, or is about nothing."""
        given, size, left = now.decision.remembered.given, 0, order
        # Of one that is given in parts it is known only once it was looked up which one is next.
        in_parts = not isinstance(order, MoveSession) and len(order.pages) > MOST_PAGES
        if _key(order) in given and not in_parts:
            return
        if isinstance(order, MoveSession):
            refused = self._full(now.moves, MOST_MOVES, "conversations were moved")
            refused = refused or bad_move(order, now.view)
        elif not order.pages:
            return
        else:
            refused = self._full(now.orders, MOST_ORDERS, "orders were given")
            refused = refused or bad_pages(order, now.view) or self._no_more(number, order, now)
            if not refused:
                refused, left, size = self._looked_up(number, order, now)
            if in_parts and not refused and _key(left) in given:
                self._in_vain(order, now)
                return
        if refused:
            self._refuse(number, order, refused, now)
        else:
            self._book(number, left, _key(left if in_parts else order), size, now)
            if in_parts and isinstance(order, LetGo) and isinstance(left, LetGo):
                self._note_part(order, left, now)

    def _note_part(self, order: LetGo, part: LetGo, now: _Round) -> None:
        """Note which part of an order was given last."""
        key, remembered = _parts_key(order), now.decision.remembered
        remembered.given[key] = now.view.now_s
        remembered.part_given[key] = order.pages.index(part.pages[0])

    def _full(self, count: int, most: int, what: str) -> str:
        return f"{most:,} {what} in this round" if count >= most else ""

    def _looked_up(self, number: int, order: PageOrder, now: _Round) -> tuple[str, PageOrder, int]:
        """Look up who has an order's pages.

        Returns:
            Why it is refused, or nothing; what is left of it; how many bytes move.
        """
        remembered = now.decision.remembered
        before = remembered.part_given.get(_parts_key(order), 0)
        refused, left, size = looked_up(order, now.view, now.holders, before)
        if refused:
            self._in_vain(order, now)
        elif isinstance(left, LetGo) and not left.also_last:
            refused = self._leaning(left, now)
        elif remembered.bytes_left < min(size, self._bytes_per_s):
            now.slowed.add(number)
            refused = self._too_fast
        return refused, left, size

    def _in_vain(self, order: PageOrder, now: _Round) -> None:
        """Note that an order was looked up for nothing: others are before it in the next rounds."""
        now.in_vain += 1
        in_vain = now.decision.remembered.in_vain
        in_vain.pop(_key(order), None)
        in_vain[_key(order)] = now.view.now_s

    def _leaning(self, order: LetGo, now: _Round) -> str:
        """Return that what an order leans on, the pool's copies or the workers', is told to go itself; else nothing."""
        others = PlaceKind.POOL if _kind(order, now) is PlaceKind.WORKER else PlaceKind.WORKER
        going = order.pages[order.start :]
        if not now.decision.remembered.let_go_at(others, going):
            return ""
        whose = "the pool" if others is PlaceKind.POOL else "a worker"
        return f"{whose} is letting go of them, so that they may be the last copies"

    def _book(
        self,
        number: int,
        order: PageOrder | MoveSession,
        key: tuple[object, ...],
        size: int,
        now: _Round,
    ) -> None:
        """Note that an order is given, and tell of it."""
        decision, name, pages = now.decision, self._names[number], 0
        decision.remembered.bytes_left -= size
        decision.remembered.given[key] = now.view.now_s
        decision.given.append(Given(name, order))
        if isinstance(order, MoveSession):
            now.moves += 1
        else:
            now.orders += 1
            pages = len(order.pages)
        if isinstance(order, LetGo):
            pages -= order.start
            going = frozenset(order.pages[order.start :])
            decision.remembered.leaving[key] = Leaving(_kind(order, now), going)
        event = ClusterEvent(name, _ACTIONS[type(order)], None, 0, order.reason, order.place, pages)
        decision.events.append(event)

    def _no_more(self, number: int, order: PageOrder, now: _Round) -> str:
        """Return why no more is looked up for orders like this one in this round; nothing where it is."""
        place = now.view.place(order.place)
        if not isinstance(order, LetGo) and (
            number in now.slowed
            or (place is not None and now.decision.remembered.bytes_left < place.page_bytes)
        ):
            return self._too_fast
        if now.in_vain >= MOST_IN_VAIN:
            return f"{MOST_IN_VAIN} orders were looked up in vain in this round"
        return ""

    def _refuse(self, number: int, order: Order, why: str, now: _Round) -> None:
        name, told = self._names[number], now.decision.remembered.told
        kind: tuple[object, ...] = (name, type(order), why)
        if kind not in now.refused and kind not in told:
            reasons = sum(key[0] == name for known in (told, now.refused) for key in known)
            if reasons >= _MOST_REASONS:
                kind = (name,)
        if kind in told:
            return
        if kind in now.refused:
            event, reason, count = now.refused[kind]
            now.refused[kind] = event, reason, count + 1
            return
        if isinstance(order, SetCopies):
            event = ClusterEvent(name, "refuse", order.group, order.copies, why)
        elif isinstance(order, WantWorkers):
            model, workers = order.model, order.workers
            event = ClusterEvent(name, "refuse", None, 0, why, model=model, workers=workers)
        else:
            event = ClusterEvent(name, "refuse", None, 0, why, order.place)
        now.refused[kind] = event, order.reason, 1

    def _tell_refused(self, now: _Round) -> None:
        """Tell each reason of a round's refusals once, with the first order that was refused for it; of many reasons the rest as one."""
        for why, (event, reason, count) in now.refused.items():
            now.decision.remembered.told[why] = now.view.now_s
            like = "likewise" if len(why) > 1 else "for this or another reason"
            more = f"; {count - 1} more {like}" if count > 1 else ""
            whole = replace(event, reason=f"{event.reason}{more} ({reason})")
            now.decision.events.append(whole)

    def _failed(self, number: int, reason: str, decision: Decision) -> None:
        name = self._names[number]
        decision.remembered.failures[number] += 1
        failures = decision.remembered.failures[number]
        # The first one and then ever fewer: a policy that always raises must not fill the log.
        if failures & (failures - 1) == 0:
            log.error("cluster policy %s: %s (%d failures)", name, reason, failures)
            decision.events.append(ClusterEvent(name, "fail", None, 0, reason))


def _kind(order: LetGo, now: _Round) -> PlaceKind:
    place = now.view.place(order.place)
    assert place is not None, "bad_pages was asked"
    return place.kind


def _parts_key(order: Order) -> tuple[object, ...]:
    return ("parts", *_key(order))


def _key(order: Order) -> tuple[object, ...]:
    if isinstance(order, SetCopies):
        return ("copies", order.group, order.copies)
    if isinstance(order, MoveSession):
        return ("move", order.session, order.place)
    if isinstance(order, WantWorkers):
        return ("want", order.model, order.workers)
    last = order.pages[-1] if order.pages else b""
    if isinstance(order, LetGo):
        return ("let-go", order.place, last, order.start, order.also_last)
    return (type(order).__name__, order.place, last)

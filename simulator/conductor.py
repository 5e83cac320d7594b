"""Cluster policies at work in virtual time: asked once a second, and their orders carried out.

Covers the rounds, and what became of orders, counted. Does not cover when they are (`pie.simulator.rounds`), what
policies are shown (`pie.router.overview`), what is decided (`pie.policies.cluster_manager`) or carrying one order out
(`pie.simulator.page_orders`, `.pool`).

Policies, manager and views are those of a live cluster (`pie.router.conductor`). A round in which no policy
can want anything is passed over: then nothing is looked at.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol

from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterEvent, ClusterManager, Given
from pie.policies.cluster_policy import (
    ClusterPolicy,
    FetchPages,
    FixedCopies,
    FixedWorkers,
    LetGo,
    MoveSession,
    StorePages,
    Wanted,
)
from pie.policies.drain import Drain
from pie.policies.expire import Expire
from pie.policies.follow_session import FollowSession
from pie.policies.prefetch import Prefetch
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.policies.rebalance import Rebalance
from pie.policies.spill_to_pool import SpillToPool
from pie.policies.steps import at_once
from pie.router.overview import Overview
from pie.simulator.page_orders import Moved, WorkerOrders
from pie.simulator.pool import SimulatedPool

_MORE = re.compile(r"; (\d+) more likewise$")

_NOTHING = (FixedCopies, FixedWorkers, Prefetch)
"""Policies that never order anything."""
_ABOUT_SESSIONS = (Drain, Expire, FollowSession, Rebalance, SpillToPool)
"""Policies that order nothing where there is no conversation."""
_MOVES: Mapping[type[object], str] = {StorePages: "stored", FetchPages: "fetched"}


class Workers(Protocol):
    """Finds workers that are up."""

    def orders_of(self, place: PlaceId) -> WorkerOrders | None:
        """Return what carries a worker's orders out; None where there is no such worker."""
        ...


class Conductor:
    """The rounds of one simulation.

    Args:
        asked: Who is asked, with what events call them.
        overview: What they are shown.
        workers: Who carries out orders about pages.
        pool: Who keeps copies; None where there is no pool.
    """

    def __init__(
        self,
        asked: Sequence[tuple[str, ClusterPolicy]],
        overview: Overview,
        workers: Workers,
        pool: SimulatedPool | None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> None:
        self._policies: list[ClusterPolicy] = [policy for _, policy in asked]
        self._manager = ClusterManager(asked)
        self._overview = overview
        self._workers = workers
        self._pool = pool
        self._prefixes = prefixes
        self.table: dict[PageKey, int] = {}
        """Groups with more copies than usual."""
        self.hints: list[tuple[float, str, int]] = []
        """When which policy said how many workers there should be."""
        self._wanted: Mapping[str, Wanted] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events by policy and action."""
        self.refusals: Counter[tuple[str, str]] = Counter()
        """By policy and reason."""
        self.moved: Counter[str] = Counter()
        """Pages that were `stored` in the pool or `fetched` from it because of orders."""
        self.changes = 0
        """How often orders have changed anything."""

    @property
    def may_order(self) -> bool:
        """Whether any policy is one that can order something."""
        return not all(isinstance(policy, _NOTHING) for policy in self._policies)

    def round(self, now_s: float) -> None:
        """Ask all policies, and carry out what comes of it."""
        quiet: tuple[type[ClusterPolicy], ...] = _NOTHING
        if not len(self._overview.conversations):
            quiet = (*_NOTHING, *_ABOUT_SESSIONS)
        if all(isinstance(policy, quiet) for policy in self._policies):
            return
        view = self._overview.view_at_once(self.table, now_s, self._wanted, self._prefixes)
        manager = self._manager
        manager.inherit(self.table)
        asked = [manager.ask(at, manager.shown(at, view)) for at in range(len(manager.names))]
        decision = at_once(manager.disposing(asked, view, self.table, self._overview))
        manager.keep(decision)
        self._wanted = decision.wanted
        for event in decision.events:
            self._note(event)
            if event.action == "hint":
                self.hints.append((now_s, event.policy, event.workers))
                self.changes += 1
        if decision.table != self.table:
            self.changes += 1
            self.table = decision.table
            if self._pool is not None:
                self._pool.set_table(self.table)
        for given in decision.given:
            self._carry_out(given, now_s)

    def _carry_out(self, given: Given, now_s: float) -> None:
        order = given.order
        if isinstance(order, MoveSession):
            self._overview.conversations.move(order.session, order.place, now_s)
            self.changes += 1
            return
        place, kind = order.place, _MOVES.get(type(order))

        def ended(moved: Moved | None) -> None:
            if moved is None:
                event = ClusterEvent(
                    given.policy, "refuse", None, 0, "too many orders about pages wait", place
                )
            else:
                event = ClusterEvent(given.policy, "done", None, 0, "", place, moved.pages)
                self.changes += bool(moved.pages)
                if kind is not None:
                    self.moved[kind] += moved.moved
            self._note(event)

        worker = self._workers.orders_of(place)
        node = None if self._pool is None else self._pool.nodes.get(place)
        if worker is not None:
            worker.carry_out(order, ended)
        elif node is not None and isinstance(order, LetGo):
            going = order.pages[order.start :]
            before = len(node.tier)
            node.tier.drop(going)
            ended(Moved(before - len(node.tier), 0))
        else:
            self._note(ClusterEvent(given.policy, "fail", None, 0, "it is gone", place))

    def _note(self, event: ClusterEvent) -> None:
        self.counts[event.policy, event.action] += 1
        if event.action in ("refuse", "fail"):
            # What was ordered is in brackets behind it, with its numbers.
            why = event.reason.split(" (", 1)[0]
            more = _MORE.search(why)
            reason = why if more is None else why[: more.start()]
            self.refusals[event.policy, reason] += 1 if more is None else 1 + int(more[1])

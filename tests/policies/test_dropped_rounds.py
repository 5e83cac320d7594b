"""A round of cluster policies of which nothing comes leaves no trace in their manager."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterManager, Decision
from pie.policies.cluster_policy import (
    ClusterPolicy,
    ClusterView,
    GroupView,
    LetGo,
    MoveSession,
    Order,
    PlaceView,
    SessionView,
    SetCopies,
    StorePages,
    WantWorkers,
)
from pie.policies.replicate_hot import ReplicateHot
from pie.policies.steps import at_once
from pie.policies.wishes import Wishes
from tests.policies.pages import Held, key, round_of

W0, W1 = PlaceId("w0"), PlaceId("w1")
PAGES = tuple(key(at) for at in range(4))
SESSION = SessionView("t", W0, None, 999.0, 999.0, PAGES, {W0: 4}, model_root=b"m")
HOLDERS = Held({"w0": 4}, 2)


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *orders: Order | None) -> None:
        self.orders = orders

    def decide(self, view: ClusterView) -> Iterable[Order]:
        return self.orders  # type: ignore[return-value]


def shown(now_s: float, uses_per_s: float = 9.0, page_bytes: int = 100) -> ClusterView:
    places = [
        PlaceView(one, PlaceKind.WORKER, model_root=b"m", page_bytes=page_bytes, model="m")
        for one in (W0, W1)
    ]
    return ClusterView(4, 1, [GroupView(key(1), uses_per_s, 1)], now_s, places, [SESSION])


def dropped(manager: ClusterManager, view: ClusterView, table: Mapping[PageKey, int]) -> Decision:
    """Run a round, and keep nothing of it."""
    manager.inherit(table)
    asked = [manager.ask(0, manager.shown(0, view))]
    return at_once(manager.disposing(asked, view, table, HOLDERS))


@pytest.mark.parametrize(
    "order",
    [
        SetCopies(key(1), 3, "r"),
        SetCopies(key(1), 9, "refused"),
        StorePages(W0, PAGES, "r"),
        StorePages(W1, PAGES, "looked up in vain"),
        LetGo(W0, PAGES, "r"),
        MoveSession("t", W1, "r"),
        WantWorkers("m", 3, "r"),
        None,
    ],
)
def test_the_next_round_comes_to_the_same(order: Order | None) -> None:
    manager = ClusterManager([("says", Says(order))])
    first = dropped(manager, shown(0.0), {})
    assert first.events
    assert manager.failures == [0]
    assert dropped(manager, shown(1.0), {}) == first
    assert round_of(manager, shown(2.0), {}, HOLDERS) == first
    assert manager.failures == [int(order is None)]


def test_bytes_of_orders_that_were_dropped_do_not_count() -> None:
    manager = ClusterManager([("says", Says(StorePages(W0, PAGES, "r")))])
    for _ in range(3):
        decision = dropped(manager, shown(0.0, page_bytes=100 << 20), {})
        assert [event.action for event in decision.events] == ["store"]


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_a_number_that_was_dropped_is_ordered_anew(copies: int) -> None:
    says = Says(SetCopies(key(1), 3, "r"))
    manager = ClusterManager([("fixed", says)])
    table = round_of(manager, shown(0.0), {}, HOLDERS).table
    says.orders = (SetCopies(key(1), copies, "r"),)
    lost = dropped(manager, shown(1.0), table).table
    assert lost == ({} if copies == 1 else {key(1): copies})
    assert round_of(manager, shown(2.0), table, HOLDERS).table == lost


def test_a_raise_that_was_kept_and_is_not_in_force_is_ordered_anew() -> None:
    manager = ClusterManager([("hot", ReplicateHot(uses=5.0, copies=4))])
    table = round_of(manager, shown(0.0, 6.0), {}, HOLDERS).table
    assert table == {key(1): 2}
    assert round_of(manager, shown(1.0, 99.0), table, HOLDERS).table == {key(1): 4}
    assert round_of(manager, shown(2.0, 99.0), table, HOLDERS).table == {key(1): 4}


def test_what_another_leader_raised_beyond_what_policies_want_is_lowered() -> None:
    says = Says(SetCopies(key(1), 2, "r"))
    manager = ClusterManager([("says", says)])
    round_of(manager, shown(0.0), {}, HOLDERS)
    decision = round_of(manager, shown(1.0), {key(1): 4}, HOLDERS)
    assert decision.table == {key(1): 2}
    (event,) = decision.events
    assert (event.action, event.copies, event.reason) == ("lower", 2, "no policy wants 4 any more")


def test_copies_of_wishes_are_changed_by_themselves() -> None:
    policies: list[ClusterPolicy] = [Says()]
    wishes = Wishes(policies)
    wishes.set(0, key(1), 2)
    other = wishes.copy()
    other.set(0, key(1), 4)
    other.inherit({key(1): 4, key(2): 3})
    assert wishes.of(0) == {key(1): 2}
    assert other.of(0) == {key(1): 4, key(2): 3}

"""How often the manager of cluster policies looks up who has pages, which takes milliseconds each time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import MOST_IN_VAIN, ClusterManager
from pie.policies.cluster_policy import ClusterView, Order, PlaceView, SessionView, StorePages
from pie.policies.order_checks import HeldPages
from pie.policies.spill_to_pool import SpillToPool
from tests.policies.pages import Held, key, round_of

A = PlaceId("a")


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *orders: Order) -> None:
        self.orders = orders

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        return self.orders


def view(*sessions: SessionView, now_s: float = 0.0, filled: int = 0) -> ClusterView:
    worker = PlaceView(
        A, PlaceKind.WORKER, page_bytes=1 << 20, pages=filled, total_pages=100_000, has_host=True
    )
    return ClusterView(1, 1, (), now_s, [worker], sessions)


def test_idle_conversations_beyond_what_may_move_are_not_looked_up() -> None:
    sessions = [
        SessionView(
            f"s{at}",
            A,
            came_from=None,
            moved_s=60.0,
            idle_s=60.0,
            pages=[key(1_000 * at + page) for page in range(300)],
            held={A: 300},
        )
        for at in range(128)
    ]
    manager, holders = ClusterManager([("spill", SpillToPool())]), Held({"a": 300})
    first = round_of(manager, view(*sessions, filled=99_000), {}, holders)
    assert (len(first.given), holders.looks) == (1, 1)
    refused = [event for event in first.events if event.action == "refuse"]
    assert len(refused) == 1, "one event tells of them all"
    assert "pages move at 256 MiB a second at most; " in refused[0].reason
    assert " more likewise (" in refused[0].reason
    # The bucket is not full again: the largest that waits is looked up, and none behind it.
    second = round_of(manager, view(*sessions, now_s=1.0, filled=99_000), {}, holders)
    assert (len(second.given), holders.looks) == (0, 2)


class Pooled(Held):
    """Nothing is left to store; notes what was asked for."""

    def __init__(self) -> None:
        super().__init__({"a": 1}, pooled=1)
        self.asked: list[PageKey] = []

    def held(self, pages: Sequence[PageKey]) -> HeldPages:
        self.asked.append(pages[0])
        return super().held(pages)


def test_of_many_orders_in_vain_so_many_are_looked_up_in_a_round_and_all_in_turn() -> None:
    orders = [StorePages(A, [key(at)], "x") for at in range(3 * MOST_IN_VAIN)]
    manager, holders = ClusterManager([("says", Says(*orders))]), Pooled()
    for second in range(3):
        holders.asked.clear()
        round_of(manager, view(now_s=float(second)), {}, holders)
        first = second * MOST_IN_VAIN
        assert holders.asked == [key(at) for at in range(first, first + MOST_IN_VAIN)]
    holders.asked.clear()
    round_of(manager, view(now_s=3.0), {}, holders)
    assert holders.asked[0] == key(0)


def test_others_have_a_turn_after_each_order() -> None:
    orders = [StorePages(A, [key(at)], "x") for at in range(20)]
    manager, holders = ClusterManager([("says", Says(*orders))]), Pooled()
    disposing = manager.disposing([manager.ask(0, view())], view(), {}, holders)
    for turns, _ in enumerate(disposing, 1):
        assert holders.looks == turns
    assert holders.looks == 20

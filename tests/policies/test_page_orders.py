"""What the manager makes of orders about pages and conversations."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterManager, Decision
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    LetGo,
    MoveSession,
    Order,
    StorePages,
)
from pie.policies.drain import Drain
from pie.policies.order_checks import HeldPages
from pie.policies.order_limits import (
    AGAIN_S,
    BYTES_PER_S,
    MOST_MOVES,
    MOST_ORDERS,
    MOST_PAGES,
    MOST_SEQUENCE_PAGES,
)
from tests.policies.pages import Held, key, round_of
from tests.policies.shown import PAGES, POOL, A, B, session, view, worker


class Says:
    """A policy that orders what a test says."""

    def __init__(self, *orders: object) -> None:
        self.orders = orders

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        return self.orders  # type: ignore[return-value]


def decided(
    *orders: object, holders: Held | None = None, shown: ClusterView | None = None
) -> Decision:
    manager = ClusterManager([("says", Says(*orders))])
    return round_of(manager, shown or view(session()), {}, holders or Held({"a": 10, "b": 0}))


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events if event.action == "refuse"]


def test_the_manager_gives_what_makes_sense_and_cuts_it_to_what_is_there() -> None:
    decision = decided(
        StorePages(A, PAGES, "full"),
        FetchPages(B, PAGES, "it moved"),
        LetGo(A, PAGES, "it moved", start=2),
        MoveSession("s", B, "busy"),
        holders=Held({"a": 9, "b": 3}, pooled=6),
    )
    assert [len(one.order.pages) for one in decision.given[:3]] == [9, 6, 6]  # type: ignore[union-attr]
    assert [(e.action, e.place, e.pages, e.reason) for e in decision.events] == [
        ("store", "a", 9, "full"),
        ("fetch", "b", 6, "it moved"),
        ("let-go", "a", 4, "it moved"),
        ("move", "b", 0, "busy"),
    ]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (StorePages(PlaceId("c"), PAGES, "x"), "there is no worker c (x)"),
        (StorePages(POOL, PAGES, "x"), "there is no worker pool (x)"),
        (StorePages(B, PAGES, "x"), "the pool has what is there (x)"),
        (FetchPages(B, PAGES, "x"), "the pool has no more than is there (x)"),
        (
            FetchPages(B, PAGES * 1_700, "x"),
            f"it is about more than {MOST_SEQUENCE_PAGES:,} pages (x)",
        ),
        (StorePages(A, [*PAGES, PAGES[0]], "x"), "it names a page twice (x)"),
        (LetGo(POOL, [*PAGES, PAGES[0]], "x"), "it names a page twice (x)"),
        (LetGo(A, PAGES, "x"), "they are the last copies (x)"),
        (LetGo(A, PAGES, "x", start=10), "it is about no page (x)"),
        (MoveSession("t", B, "x"), "there is no conversation t (x)"),
        (MoveSession("s", POOL, "x"), "there is no worker pool (x)"),
        (MoveSession("s", A, "x"), "it is at a already (x)"),
    ],
)
def test_the_manager_refuses_with_a_reason(order: Order, why: str) -> None:
    decision = decided(order)
    assert reasons(decision) == [why]
    assert decision.given == []


def test_nothing_goes_to_a_worker_that_leaves_or_has_another_model() -> None:
    shown = view(session(), places=[worker(A), worker(B, draining=True)])
    orders = MoveSession("s", B, "x"), FetchPages(B, PAGES, "x")
    held = Held({"a": 10}, pooled=10)
    assert reasons(decided(*orders, shown=shown, holders=held)) == ["b is leaving (x)"] * 2
    shown = view(session(), places=[worker(A), worker(B, model_root=b"o", has_host=False)])
    assert reasons(decided(*orders, shown=shown, holders=held)) == [
        "b has another model (x)",
        "b keeps nothing in host memory (x)",
    ]
    assert reasons(decided(StorePages(A, PAGES, "x"), shown=view(nodes=0))) == [
        "no pool node is up (x)"
    ]


def test_the_last_copy_goes_only_for_a_policy_that_says_so() -> None:
    assert len(decided(LetGo(A, PAGES, "old", also_last=True)).given) == 1
    pool = LetGo(POOL, PAGES, "x")
    assert reasons(decided(pool, holders=Held({}))) == ["they are the last copies (x)"]
    assert len(decided(pool, holders=Held({"a": 4})).given) == 1


def test_an_order_is_not_given_again_at_once_and_a_refusal_not_told_again() -> None:
    manager = ClusterManager([("says", Says(StorePages(A, PAGES, "x"), StorePages(B, PAGES, "x")))])
    given, told = [], []
    for second in range(int(AGAIN_S) + 1):
        decision = round_of(manager, view(now_s=float(second)), {}, Held({"a": 10}))
        given.append(len(decision.given))
        told.append(len(reasons(decision)))
    assert given == [1, *[0] * (int(AGAIN_S) - 1), 1]
    assert told == [1, *[0] * int(AGAIN_S)]


LONG = tuple(key(at) for at in range(2 * MOST_PAGES + 100))


@pytest.mark.parametrize("where", [A, POOL])
@pytest.mark.parametrize("also_last", [False, True])
def test_what_is_longer_than_one_order_moves_and_goes_in_parts(
    where: PlaceId, *, also_last: bool
) -> None:
    policy = Says()
    manager = ClusterManager([("says", policy)])
    places = Places({A: set(LONG), B: set(), POOL: set()})
    shown = view(places=[worker(A, page_bytes=10), worker(B, page_bytes=10)])

    def rounds(order: Order) -> list[int]:
        """Return how many pages of each part are new, until no more is given."""
        policy.orders, moved = (order,), []
        while given_now := round_of(manager, shown, {}, places).given:
            (one,) = given_now
            assert not isinstance(one.order, MoveSession)
            assert len(one.order.pages) <= MOST_PAGES
            assert LONG.index(one.order.pages[0]) % MOST_PAGES == 0, "with whole groups of pages"
            if one.order.place != POOL:
                assert round_of(manager, shown, {}, places).given == [], "until it was carried out"
            before = len(places.by_place[one.order.place])
            moved.append(places.carry_out(one.order))
            moved[-1] = moved[-1] or before - len(places.by_place[one.order.place])
        return moved

    parts = [MOST_PAGES, MOST_PAGES, 100]
    assert rounds(StorePages(A, LONG, "x")) == parts
    assert rounds(FetchPages(B, LONG, "x")) == parts
    order = LetGo(where, LONG, "x", start=50, also_last=also_last)
    assert rounds(order) == [100, MOST_PAGES, MOST_PAGES - 50]
    assert places.by_place[where] == set(LONG[:50])
    assert set().union(*places.by_place.values()) == set(LONG)


@pytest.mark.parametrize("also_last", [False, True])
def test_parts_go_by_turns_at_a_pool_node_while_another_keeps_its_copies(
    *, also_last: bool
) -> None:
    order = LetGo(POOL, LONG, "x", start=MOST_PAGES + 50, also_last=also_last)
    manager = ClusterManager([("says", Says(order))])
    kept = Held({"a": len(LONG)}, pooled=len(LONG))
    begin = list[tuple[int, PageKey]]()
    for second in range(int(AGAIN_S) + 2):
        shown = view(places=[worker(A, page_bytes=10)], now_s=float(second))
        for one in round_of(manager, shown, {}, kept).given:
            assert isinstance(one.order, LetGo)
            begin.append((second, one.order.pages[one.order.start]))
    again_s = int(AGAIN_S)
    last, first = LONG[2 * MOST_PAGES], LONG[MOST_PAGES + 50]
    assert begin == [(0, last), (1, first), (again_s, last), (again_s + 1, first)]


def test_policies_that_replace_others_go_on_with_what_those_have_ordered() -> None:
    says = Says(StorePages(A, PAGES, "x"), LetGo(B, PAGES, "x"))
    large = view(places=[worker(A, page_bytes=60 << 20), worker(B)])
    before, held = ClusterManager([("says", says)]), Held({"a": 4, "b": 4}, pooled=1)
    assert len(round_of(before, large, {}, held).given) == 2
    after = ClusterManager([("other", Says(*says.orders, StorePages(A, PAGES[:3], "x")))])
    after.go_on_from(before)
    decision = round_of(after, large, {}, held)
    assert decision.given == []
    assert reasons(decision) == ["pages move at 256 MiB a second at most (x)"]
    after = ClusterManager([("other", Says(LetGo(POOL, PAGES, "x")))])
    after.go_on_from(before)
    (refused,) = reasons(round_of(after, large, {}, held))
    assert refused.startswith("a worker is letting go of them")


def test_a_second_order_to_let_go_that_means_more_is_given_too() -> None:
    manager = ClusterManager([("says", policy := Says())])
    pooled = Held({"a": 10}, pooled=10)
    for order in (
        LetGo(A, PAGES, "x", start=5),
        LetGo(A, PAGES, "x", start=2),
        LetGo(A, PAGES, "x", start=2, also_last=True),
    ):
        policy.orders = (order,)
        assert [one.order for one in round_of(manager, view(), {}, pooled).given] == [order]
        assert round_of(manager, view(), {}, pooled).given == []


def test_so_many_conversations_move_in_a_round_whatever_else_is_given() -> None:
    sessions = [session(f"s{at}", came_from=None) for at in range(MOST_MOVES)]
    shown = view(*sessions, places=[worker(A, draining=True), worker(B)])
    stores = [StorePages(A, [key(100 + at)], "x") for at in range(MOST_ORDERS + 1)]
    manager = ClusterManager(
        [("says", Says(*stores)), ("drain", Drain(sessions=MOST_MOVES)), ("more", Drain())]
    )
    decision = round_of(manager, shown, {}, Held({"a": 1}))
    given = [type(one.order) for one in decision.given]
    assert (given.count(StorePages), given.count(MoveSession)) == (MOST_ORDERS, MOST_MOVES)
    assert reasons(decision) == [f"{MOST_ORDERS} orders were given in this round (x)"]
    tenth = replace(shown, sessions=[*sessions, session("one more")])
    policy = Says(*(MoveSession(one.session, B, "x") for one in tenth.sessions))
    decision = round_of(ClusterManager([("says", policy)]), tenth, {}, Held())
    assert reasons(decision) == ["1,024 conversations were moved in this round (x)"]


def test_nonsense_is_counted_and_what_is_good_beside_it_is_carried_out() -> None:
    nonsense: list[object] = [
        StorePages(A, [1, 2], "x"),  # type: ignore[list-item]
        StorePages(A, 7, "x"),  # type: ignore[arg-type]
        MoveSession("s", B, None),  # type: ignore[arg-type]
        LetGo(A, PAGES, "x", start="0"),  # type: ignore[arg-type]
        "store everything",
    ]
    decision = decided(*nonsense, StorePages(A, PAGES, "good"))
    assert [event.action for event in decision.events] == ["fail", "store"]
    assert decision.events[0].reason == "5 proposals are no orders"


def test_one_policy_that_fails_does_not_keep_the_others_from_ordering() -> None:
    class Raises:
        def decide(self, shown: ClusterView) -> Iterable[Order]:
            raise SystemExit(3)

    manager = ClusterManager([("raises", Raises()), ("says", Says(StorePages(A, PAGES, "x")))])
    decision = round_of(manager, view(), {}, Held({"a": 10}))
    assert [(event.policy, event.action) for event in decision.events] == [
        ("raises", "fail"),
        ("says", "store"),
    ]


COUNTS = st.sampled_from([10, 0, 5, 7])
RUNS = st.one_of(
    COUNTS.map(lambda count: PAGES[:count]),
    st.lists(st.sampled_from(PAGES), max_size=12),
)
"""Of a sequence from its first page on, as they are to be, and others."""
ORDERS = st.one_of(
    st.builds(StorePages, st.sampled_from([A, B, POOL, PlaceId("c")]), RUNS, st.just("x")),
    st.builds(FetchPages, st.sampled_from([A, B, POOL]), RUNS, st.just("x")),
    st.builds(
        LetGo, st.sampled_from([A, B, POOL]), RUNS, st.just("x"), st.sampled_from([0, 5, 11, -1])
    ),
    st.builds(MoveSession, st.sampled_from(["s", "t"]), st.sampled_from([A, B]), st.just("x")),
)
HELD = COUNTS.map(lambda count: set(PAGES[:count]))


class Places:
    """Workers and a pool that do what they are told, whatever becomes of it."""

    def __init__(self, held: dict[PlaceId, set[PageKey]]) -> None:
        self.by_place = held

    def held(self, pages: Sequence[PageKey]) -> HeldPages:
        found = {
            place: next((at for at, page in enumerate(pages) if page not in has), len(pages))
            for place, has in self.by_place.items()
        }
        return HeldPages(found, found.pop(POOL))

    def carry_out(self, order: StorePages | FetchPages | LetGo) -> int:
        """Return how many pages moved."""
        here, pool = self.by_place[order.place], self.by_place[POOL]
        if isinstance(order, LetGo):
            here -= set(order.pages[order.start :])
            return 0
        source, into = (here, pool) if isinstance(order, StorePages) else (pool, here)
        before = len(into)
        into |= source & set(order.pages)
        return len(into) - before


@given(
    rounds=st.lists(st.lists(ORDERS, max_size=20), max_size=6),
    held=st.fixed_dictionaries({A: HELD, B: HELD, POOL: HELD}),
    page_bytes=st.sampled_from([1, 1 << 20, 64 << 20]),
    late=st.integers(0, 2),
    draws=st.randoms(use_true_random=False),
)
def test_whatever_is_ordered_no_last_copy_goes_and_the_rate_is_kept(
    rounds: list[list[Order]],
    held: dict[PlaceId, set[PageKey]],
    page_bytes: int,
    late: int,
    draws: random.Random,
) -> None:
    """Orders are carried out in any order, some rounds after they were given."""
    holders, every = Places(held), set().union(*held.values())
    policy = Says()
    manager = ClusterManager([("says", policy)])
    moved, under_way = 0, list[list[StorePages | FetchPages | LetGo]]()
    places = [worker(A, page_bytes=page_bytes), worker(B, page_bytes=page_bytes)]
    for second, orders in enumerate(rounds):
        policy.orders = tuple(orders)
        shown = view(session(), places=places, now_s=float(second))
        decision = round_of(manager, shown, {}, holders)
        about_pages = [
            one.order for one in decision.given if not isinstance(one.order, MoveSession)
        ]
        assert len(about_pages) <= MOST_ORDERS
        assert all(event.reason for event in decision.events)
        draws.shuffle(about_pages)
        under_way.append(about_pages)
        for order in under_way.pop(0) if len(under_way) > late else ():
            moved += holders.carry_out(order) * page_bytes
            assert set().union(*held.values()) == every, order
    # Twice a second's worth may have gathered, and one order larger than that goes all the same.
    assert moved <= BYTES_PER_S * (len(rounds) + 2) + 12 * page_bytes


def test_of_two_that_lean_on_each_others_copies_one_keeps_its_own() -> None:
    held = Held({"a": 10}, pooled=10)
    near, pooled = LetGo(A, PAGES, "x", start=4), LetGo(POOL, PAGES, "y")
    for orders, refused in (
        ((near, pooled), "a worker is letting go of them, so that they may be the last copies (y)"),
        ((pooled, near), "the pool is letting go of them, so that they may be the last copies (x)"),
    ):
        decision = decided(*orders, holders=held)
        assert [one.order for one in decision.given] == [orders[0]]
        assert reasons(decision) == [refused]
    both = decided(near, replace(pooled, also_last=True), holders=held)
    assert len(both.given) == 2, "the policy says that last copies go"
    assert len(decided(near, LetGo(POOL, PAGES[:4], "y"), holders=held).given) == 2
    leaving = view(session(), places=[worker(A, draining=True), worker(B)])
    assert reasons(decided(pooled, holders=held, shown=leaving)) == ["they are the last copies (y)"]


@pytest.mark.parametrize(("megabytes", "second_at_s"), [(1, 4), (3, 2), (256, 0)])
def test_how_much_moves_is_as_it_is_set_and_a_later_manager_goes_on_with_it(
    megabytes: int, second_at_s: int
) -> None:
    policy = Says(StorePages(A, PAGES[:4], "x"), StorePages(B, PAGES[:3], "x"))
    manager: ClusterManager | None = None
    given, why = list[tuple[int, int]](), set[str]()
    for second in range(6):
        before = manager
        manager = ClusterManager([("says", policy)], bytes_per_s=megabytes << 20)
        if before is not None:
            manager.go_on_from(before)
        decision = round_of(manager, view(now_s=float(second)), {}, Held({"a": 4, "b": 3}))
        why.update(event.reason for event in decision.events if event.action == "refuse")
        for one in decision.given:
            assert isinstance(one.order, StorePages)
            given.append((second, len(one.order.pages)))
    # A page is of 1 MiB. What is larger than a second's bytes goes all the same, and what comes next waits for it.
    assert given == [(0, 4), (second_at_s, 3)]
    assert why == (
        {f"pages move at {megabytes} MiB a second at most (x)"} if second_at_s else set()
    )

"""Cluster policies that move pages and conversations, and what the manager makes of their orders."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterManager, Decision
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    GroupView,
    LetGo,
    MoveSession,
    Order,
    PlaceView,
    SessionView,
    StorePages,
)
from pie.policies.drain import Drain
from pie.policies.errors import PolicyFileError
from pie.policies.expire import Expire
from pie.policies.follow_session import FollowSession
from pie.policies.loader import load_policies
from pie.policies.order_checks import HeldPages
from pie.policies.order_limits import AGAIN_S, BYTES_PER_S, MOST_MOVES, MOST_ORDERS, MOST_PAGES
from pie.policies.policy_set import PolicySet, WorkerMoves, always
from pie.policies.rebalance import Rebalance
from pie.policies.spill_to_pool import SpillToPool
from tests.policies.pages import Held, key, round_of

A, B, POOL = PlaceId("a"), PlaceId("b"), PlaceId("pool")
ROOT = b"model"
PAGES = tuple(key(at) for at in range(10))


def worker(place: PlaceId, **fields: object) -> PlaceView:
    given: dict[str, object] = {
        "model_root": ROOT,
        "page_bytes": 1 << 20,
        "total_pages": 100,
        "has_host": True,
    }
    return PlaceView(place, PlaceKind.WORKER, **(given | fields))  # type: ignore[arg-type]


def session(name: str = "s", place: PlaceId = A, **fields: object) -> SessionView:
    given: dict[str, object] = {
        "came_from": None,
        "moved_s": 1.0,
        "idle_s": 60.0,
        "pages": PAGES,
        "held": {A: 10},
        "model_root": ROOT,
    }
    return SessionView(name, place, **(given | fields))  # type: ignore[arg-type]


def view(
    *sessions: SessionView,
    places: Sequence[PlaceView] = (),
    nodes: int = 1,
    now_s: float = 0.0,
) -> ClusterView:
    shown = [*(places or (worker(A), worker(B))), PlaceView(POOL, PlaceKind.POOL)]
    return ClusterView(nodes, 1, (), now_s, shown, sessions)


def said(orders: Iterable[Order]) -> list[tuple[str, str, int]]:
    """Return what is ordered: which kind, where, and how many pages."""
    return [
        (type(one).__name__, one.place, len(getattr(one, "pages", ())))
        for one in orders
        if hasattr(one, "place")
    ]


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


def test_a_leaving_workers_conversations_go_to_the_least_busy_and_their_pages_follow() -> None:
    places = [worker(A, draining=True), worker(B, waiting=2)]
    assert said(Drain().decide(view(session(), places=places))) == [("MoveSession", "b", 0)]
    moved = session(place=B, came_from=A, pooled=4)
    assert said(Drain().decide(view(moved, places=places))) == [
        ("StorePages", "a", 10),
        ("FetchPages", "b", 4),
    ]
    there = session(place=B, came_from=A, pooled=10, held={A: 10, B: 10})
    assert said(Drain().decide(view(there, places=places))) == []
    assert said(Drain().decide(view(session()))) == []
    assert said(Drain(sessions=0).decide(view(session(), places=places))) == []


def test_with_nowhere_to_go_a_leaving_workers_conversations_stay() -> None:
    places = [worker(A, draining=True), worker(B, model_root=b"other")]
    assert said(Drain().decide(view(session(), places=places))) == []


def test_a_nearly_full_worker_stores_what_the_pool_lacks_the_longest_idle_first() -> None:
    places = [worker(A, pages=90), worker(B, pages=10)]
    sessions = [
        session("fresh", idle_s=1.0),
        session("idle", idle_s=50.0, held={A: 7, B: 9}),
        session("idlest", idle_s=70.0, pages=PAGES[:5], held={A: 5}),
        session("pooled", idle_s=90.0, pooled=10),
    ]
    spill = SpillToPool(above=0.8, idle=5.0)
    assert said(spill.decide(view(*sessions, places=places))) == [
        ("StorePages", "a", 5),
        ("StorePages", "a", 7),
    ]
    assert said(spill.decide(view(*sessions, places=places, nodes=0))) == []
    assert said(SpillToPool(above=0.95).decide(view(*sessions, places=places))) == []


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
            FetchPages(B, PAGES * 300, "x"),
            f"it is about more than {MOST_PAGES} pages (x)",
        ),
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


def migration(text: str) -> PolicySet:
    return load_policies(f"cluster: {{migration: {text}}}", name="policies.yaml")


def test_the_file_adds_to_what_is_always_there_and_says_how_it_goes() -> None:
    found = migration("[{policy: prefetch, requests: 9}, drain]")
    assert [spec.name for spec in found.migration] == ["prefetch", "drain", "spill-to-pool"]
    assert found.worker_moves() == WorkerMoves(looks_ahead=9)
    assert PolicySet().worker_moves() == WorkerMoves()
    assert PolicySet().migration == migration("").migration == always()
    off = "[{policy: spill-to-pool, as_made: false}, {policy: drain, share: 0}]"
    assert migration(off).worker_moves() == WorkerMoves(stores_as_made=False, drain_share=0.0)
    assert not migration(off).same_cluster(PolicySet())
    assert migration(off).same_cluster(migration(off))


def test_all_that_is_wrong_with_migration_is_told() -> None:
    with pytest.raises(PolicyFileError) as caught:
        migration("[{policy: drian}, {policy: drain, share: 2}, {requests: 3}, drain, drain]")
    problems = [problem.message for problem in caught.value.problems]
    assert "did you mean 'drain'" in problems[0]
    assert "less than or equal to 1" in problems[1]
    assert "`policy` is missing" in problems[2]
    assert problems[3] == "'drain' is named twice"
    for text, said_so in (("drain", "must be a list"), ("[" + "drain, " * 17 + "]", "at most 16")):
        with pytest.raises(PolicyFileError, match=said_so):
            migration(text)


def test_a_conversation_that_moved_takes_its_pages_along() -> None:
    follow = FollowSession(within=10.0)
    moved = session(place=B, came_from=A, held={A: 8, B: 2}, pooled=5)
    assert said(follow.decide(view(moved))) == [("StorePages", "a", 8), ("FetchPages", "b", 5)]
    gone = view(moved, places=[worker(B)])
    assert said(follow.decide(gone)) == [("FetchPages", "b", 5)]
    long_ago = session(place=B, came_from=A, pooled=5, moved_s=11.0)
    assert said(follow.decide(view(long_ago, session()))) == []


def test_the_worker_that_had_it_lets_go_of_what_nobody_shares_once_the_other_has_it() -> None:
    follow = FollowSession(leave=False)
    there = session(place=B, came_from=A, held={A: 8, B: 8}, pooled=8, shared=3)
    (order,) = follow.decide(view(there))
    assert order == LetGo(A, PAGES[:8], "conversation s is at b", start=3)
    assert said(FollowSession().decide(view(there))) == []
    shared = session(place=B, came_from=A, held={A: 8, B: 8}, pooled=8, shared=8)
    assert said(follow.decide(view(shared))) == []


def test_idle_conversations_leave_a_full_worker_for_an_empty_one() -> None:
    places = [worker(A, pages=95), worker(B, pages=20)]
    sessions = [
        session("fresh", idle_s=3.0),
        session("idle", idle_s=20.0),
        session("idlest", idle_s=30.0),
        session("shared", idle_s=99.0, shared=10),
        session("elsewhere", B, idle_s=99.0, held={B: 10}),
    ]
    rebalance = Rebalance(sessions=1, idle=10.0)
    assert list(rebalance.decide(view(*sessions, places=places))) == [
        MoveSession("idlest", B, "a is 95% full, the other 20%")
    ]
    moved = session("idlest", B, came_from=A, held={A: 10, B: 10}, pooled=10, shared=2)
    orders = list(rebalance.decide(view(moved, places=places, now_s=1.0)))
    assert orders == [LetGo(A, PAGES, "conversation idlest is at b now", start=2)]
    alike = [worker(A, pages=95), worker(B, pages=80)]
    assert said(Rebalance().decide(view(*sessions, places=alike))) == []
    alone = [worker(A, pages=95), worker(B, pages=1, model_root=b"other")]
    assert said(Rebalance().decide(view(*sessions, places=alone))) == []


def test_idle_conversations_leave_a_worker_where_many_wait() -> None:
    places = [worker(A, waiting=5), worker(B, waiting=1)]
    assert said(Rebalance(waiting=4).decide(view(session(), places=places))) == [
        ("MoveSession", "b", 0)
    ]
    assert said(Rebalance(waiting=5).decide(view(session(), places=places))) == []


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 9), st.sampled_from([ROOT, b"other"])),
        max_size=8,
    )
)
def test_each_worker_that_has_too_much_gives_to_the_one_of_its_model_that_has_least(
    loads: list[tuple[int, int, bytes]],
) -> None:
    places = [
        worker(PlaceId(f"w{at}"), pages=pages, waiting=waiting, model_root=root)
        for at, (pages, waiting, root) in enumerate(loads)
    ]
    sessions = [session(f"s{one.place}", one.place, held={one.place: 1}) for one in places]
    shown = view(*sessions, places=places or (worker(A),))
    expected: dict[str, PlaceId] = {}
    for one in places:
        others = [other for other in shown.workers(one.model_root) if other is not one]
        if not others:
            continue
        calm = min(others, key=lambda other: (other.waiting, other.filled))
        empty = min(others, key=lambda other: (other.filled, other.waiting))
        if one.waiting - calm.waiting >= 4:
            expected[f"s{one.place}"] = calm.place
        elif one.filled >= 0.9 and one.filled - empty.filled >= 0.25:
            expected[f"s{one.place}"] = empty.place
    orders = Rebalance(rate=1 << 40).decide(shown)
    moved = [one for one in orders if isinstance(one, MoveSession)]
    assert {one.session: one.place for one in moved} == expected


def test_workers_are_sorted_once_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    plain = ClusterView.workers

    def workers(self: ClusterView, model_root: bytes | None = None) -> list[PlaceView]:
        asked.append(model_root)
        return plain(self, model_root)

    monkeypatch.setattr(ClusterView, "workers", workers)
    places = [worker(PlaceId(f"w{at}"), pages=95) for at in range(50)]
    assert said(Rebalance().decide(view(session(), places=places))) == []
    assert asked == [None]


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30), st.integers(1, 8))
def test_rebalance_keeps_to_its_rate(sizes: list[int], megabytes: int) -> None:
    places = [worker(A, pages=95), worker(B, pages=20)]
    sessions = [session(f"s{at}", held={A: size}) for at, size in enumerate(sizes)]
    rebalance = Rebalance(rate=megabytes << 20, sessions=64)
    moved = 0
    for second in range(10):
        for order in rebalance.decide(view(*sessions, places=places, now_s=float(second))):
            assert isinstance(order, MoveSession)
            moved += sizes[int(order.session[1:])]
        # A conversation larger than a second's worth goes when nothing else does.
        assert moved <= megabytes * (second + 2) + max(sizes)


def test_conversations_that_nobody_goes_on_with_leave_everywhere_but_what_others_share() -> None:
    old = session("old", idle_s=100.0, shared=3, held={A: 10, B: 2}, pooled=10, tenant_tag="8f")
    orders = list(Expire(after=60.0).decide(view(old, session("new", idle_s=50.0))))
    assert orders == [
        LetGo(place, PAGES, "conversation old is idle for 100 s", start=3, also_last=True)
        for place in (A, POOL)
    ]
    near = list(Expire(after=60.0, pool=False).decide(view(old)))
    assert [(one.place, one.also_last) for one in near if isinstance(one, LetGo)] == [(A, False)]
    assert said(Expire(after=60.0, tenant="9*").decide(view(old))) == []
    assert said(Expire(after=60.0, session="old").decide(view(old))) == [
        ("LetGo", "a", 10),
        ("LetGo", "pool", 10),
    ]
    gone = session("old", idle_s=100.0, shared=3, held={A: 3}, pooled=3)
    assert said(Expire(after=60.0).decide(view(gone))) == []


def test_what_prompts_of_no_conversation_had_lately_does_not_expire() -> None:
    old = session("old", idle_s=100.0, held={A: 10})

    def starts(*groups: GroupView) -> list[int]:
        seen = replace(view(old), groups=groups)
        return [one.start for one in Expire(after=60.0).decide(seen) if isinstance(one, LetGo)]

    others = GroupView(PAGES[0], 0.1, 1, chain=PAGES[:4])
    assert starts(others) == [4]
    assert starts(replace(others, uses_per_s=0.001)) == [0]
    assert starts(replace(others, session_tag="old")) == [0]
    assert starts(replace(others, session_tag="old"), replace(others, chain=PAGES[:2])) == [2]

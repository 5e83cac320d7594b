"""Cluster policies that move pages and conversations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from pie.page.events import PlaceId
from pie.policies.cluster_policy import (
    ClusterView,
    GroupView,
    LetGo,
    MoveSession,
    Order,
    PlaceView,
    SessionView,
)
from pie.policies.drain import Drain
from pie.policies.errors import PolicyFileError
from pie.policies.expire import Expire
from pie.policies.follow_session import FollowSession
from pie.policies.loader import load_policies
from pie.policies.policy_set import PolicySet, WorkerMoves, always
from pie.policies.rebalance import Rebalance
from pie.policies.spill_to_pool import SpillToPool
from tests.policies.shown import PAGES, POOL, ROOT, A, B, session, view, worker


def said(orders: Iterable[Order]) -> list[tuple[str, str, int]]:
    """Return what is ordered: which kind, where, and how many pages."""
    return [
        (type(one).__name__, one.place, len(getattr(one, "pages", ())))
        for one in orders
        if hasattr(one, "place")
    ]


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
    follow = FollowSession(keep=False)
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
    at_a = {f"s{at}": session(f"s{at}", held={A: size}) for at, size in enumerate(sizes)}
    rebalance = Rebalance(rate=megabytes << 20, sessions=64)
    moved = 0
    for second in range(10):
        for order in rebalance.decide(view(*at_a.values(), places=places, now_s=float(second))):
            assert isinstance(order, MoveSession)
            moved += sizes[int(order.session[1:])]
            at_a[order.session] = replace(at_a[order.session], place=B)
        # A conversation larger than a second's worth goes when nothing else does.
        assert moved <= megabytes * (second + 2) + max(sizes)


def test_a_conversation_of_which_the_move_was_refused_is_moved_later_and_costs_nothing() -> None:
    places = [worker(A, pages=95), worker(B, pages=20)]
    rebalance = Rebalance(rate=4 << 20, sessions=64)
    waits = [session(name, held={A: 4}) for name in "stuvw"]

    def moves(now_s: float, *sessions: SessionView) -> list[str]:
        orders = list(rebalance.decide(view(*sessions, places=places, now_s=now_s)))
        return [one.session for one in orders if isinstance(one, MoveSession)]

    assert moves(0.0, *waits) == ["s", "t"]
    assert moves(0.0, *waits) == [], "they may be on their way"
    assert moves(1.0, replace(waits[0], place=B), *waits[1:]) == ["u"]
    assert moves(3.0, replace(waits[0], place=B), *waits[1:]) == ["v", "w"]
    there = [replace(one, place=B, came_from=A) for one in waits if one.session != "t"]
    assert moves(5.0, *there, waits[1]) == ["t"], "the manager has refused it"


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

"""What the router that leads sees of all routers, and what they hear of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import httpx
import pytest
from hypothesis import given, strategies as st

from pie.index.mirror import Mirror
from pie.index.router_views import (
    MemoryRouterViews,
    Move,
    RouterView,
    SeenGroup,
    SeenSession,
)
from pie.page.events import PlaceId
from pie.page.key import PageKey, RootKey, page_keys, tenant_root
from pie.policies.cluster_policy import (
    ClusterPolicy,
    ClusterView,
    MoveSession,
    Order,
    SessionView,
    SetCopies,
)
from pie.policies.policy_set import PolicySet, PolicySpec
from pie.policies.prefixes import NO_PREFIXES, NamedPrefix, Prefixes
from pie.policies.replicate import Replicate
from pie.policies.replicate_hot import ReplicateHot
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.overview import Overview
from tests.router.conftest import Cluster, until

A, B = PlaceId("a"), PlaceId("b")
ROOT = RootKey(b"root")


def chain(*path: int) -> list[PageKey]:
    """Return keys that name all before them, as pages' keys do."""
    return [PageKey(bytes(path[: at + 1]).ljust(32, b"\0")) for at in range(len(path))]


class Router:
    """What one router sees and is told, at times that a test says."""

    def __init__(self, views: MemoryRouterViews) -> None:
        self.views = views
        self.demand = Demand()
        self.conversations = Conversations()
        self.overview = Overview(Mirror(), dict, self.demand, self.conversations)

    def asked(
        self,
        name: str,
        keys: Sequence[PageKey],
        place: PlaceId,
        at_s: float,
        *,
        ends: bool = True,
        root: RootKey = ROOT,
    ) -> None:
        """Take a request of a conversation."""
        known = self.conversations
        self.demand.used(keys, at_s)
        tags = {"model_root": ROOT, "tenant_tag": "t", "session_tag": f"tag-{name}", "root": root}
        self.demand.held_by(keys, at_s, **tags)  # type: ignore[arg-type]
        known.began((None, name), place, ROOT, keys, at_s)
        known.named((None, name), f"tag-{name}", "t")
        if ends:
            known.ended((None, name), keys, at_s)

    def tell(self, now_s: float) -> None:
        for move in self.views.tell(self.overview.seen(now_s)):
            self.conversations.move(move.tag, move.place, now_s)

    def view(self, now_s: float, prefixes: Prefixes = NO_PREFIXES) -> ClusterView:
        """Return what policies are shown where this router leads."""
        self.overview.elsewhere.learn(self.views.others(), now_s)
        return self.overview.view_at_once({}, now_s, prefixes=prefixes)

    def sessions(self, now_s: float) -> dict[str, SessionView]:
        return {one.session.removeprefix("tag-"): one for one in self.view(now_s).sessions}


@pytest.fixture
def routers() -> tuple[Router, Router]:
    """One that leads, and another."""
    views = MemoryRouterViews("leads", clock=lambda: 0.0)
    return Router(views), Router(views.beside("other"))


def test_conversations_of_all_routers_are_shown_the_latest_first(
    routers: tuple[Router, Router],
) -> None:
    leads, other = routers
    leads.asked("x", chain(1), A, 1.0)
    other.asked("y", chain(2, 3), B, 3.0, ends=False)
    leads.asked("z", chain(4), A, 5.0)
    other.tell(7.0)
    found = leads.sessions(8.0)
    assert list(found) == ["z", "y", "x"]
    one = found["y"]
    assert (one.place, one.idle_s, list(one.pages), one.model_root) == (B, 0.0, chain(2, 3), ROOT)
    other.conversations.ended((None, "y"), chain(2, 3), 8.0)
    other.tell(9.0)
    assert leads.sessions(9.0)["y"].idle_s == 1.0
    other.views.withdraw()
    assert list(leads.sessions(9.0)) == ["z", "x"]


def test_groups_of_a_named_prefix_are_known_whose_prompt_holds_them_and_at_whichever_router(
    routers: tuple[Router, Router],
) -> None:
    prefixes = Prefixes({"desk": NamedPrefix(tokens=list(range(80)))})
    prefixes.meet(ROOT, 2)
    wanted = set[PageKey]()
    for router, salt in zip((*routers, routers[1]), (None, "one", "two"), strict=True):
        root = tenant_root(ROOT, salt=salt)
        keys = page_keys(root, range(140), 2)
        wanted |= {keys[0], keys[32]}
        for prompt in (keys, page_keys(root, range(9, 149), 2)):
            for _ in range(2):
                router.asked(f"{salt}", prompt, A, 0.0, root=root)
    routers[1].tell(0.0)
    view = routers[0].view(0.0, prefixes)
    assert len(view.groups) == 3 * 2 * 3
    assert {one.group for one in view.groups if one.prefixes == {"desk"}} == wanted
    assert not any(one.prefixes for one in routers[0].view(0.0).groups)
    orders = list(Replicate(2, prefix="desk").decide(replace(view, nodes=2)))
    assert {one.group for one in orders if isinstance(one, SetCopies)} == wanted
    assert all(one.chain for one in view.groups), "what comes after it is known, and not meant"


def test_a_conversation_that_both_know_is_where_its_latest_request_went(
    routers: tuple[Router, Router],
) -> None:
    leads, other = routers
    leads.asked("s", chain(1, 2), A, 1.0)
    other.asked("s", chain(1, 2, 3), B, 4.0)
    other.tell(6.0)
    (one,) = leads.sessions(6.0).values()
    assert (one.place, one.came_from, one.moved_s, len(one.pages)) == (B, A, 2.0, 3)
    assert one.shared == 0, "with itself it shares nothing"
    leads.asked("s", chain(1, 2, 3, 4), B, 7.0)
    (one,) = leads.sessions(8.0).values()
    assert (one.place, one.came_from, len(one.pages)) == (B, A, 4)


def test_a_conversation_runs_where_any_of_its_answers_does(routers: tuple[Router, Router]) -> None:
    leads, other = routers
    other.asked("s", chain(1, 2), A, 1.0, ends=False)
    leads.asked("s", chain(1, 2), A, 3.0)
    other.tell(5.0)
    assert leads.sessions(5.0)["s"].idle_s == 0.0
    other.conversations.ended((None, "s"), chain(1, 2), 6.0)
    other.tell(7.0)
    assert leads.sessions(7.0)["s"].idle_s == 1.0


def test_what_conversations_of_two_routers_share_is_known_at_the_first_look(
    routers: tuple[Router, Router],
) -> None:
    leads, other = routers
    leads.asked("x", chain(1, 2, 3), A, 1.0)
    other.asked("y", chain(1, 2, 4, 5), B, 2.0)
    other.tell(3.0)
    assert {name: one.shared for name, one in leads.sessions(3.0).items()} == {"x": 2, "y": 2}
    other.views.withdraw()
    assert leads.sessions(4.0)["x"].shared == 0


def test_what_each_sees_a_part_of_is_hot_together(routers: tuple[Router, Router]) -> None:
    leads, other = routers
    prompt = chain(*range(40))
    for router in routers:
        for at in range(40):
            router.asked("s", prompt, A, at / 10)
    policy = ReplicateHot(uses=8.0, copies=2)

    def wanted(now_s: float) -> int:
        shown = leads.view(now_s)
        places = ClusterView(2, 1, shown.groups, now_s)
        return sum(isinstance(one, SetCopies) for one in policy.decide(places))

    assert wanted(4.0) == 0
    other.tell(4.0)
    assert wanted(4.0) == 2
    other.views.withdraw()
    assert wanted(4.0) == 0


def test_a_hot_prompt_that_only_another_router_has_seen_is_shown_whole(
    routers: tuple[Router, Router],
) -> None:
    leads, other = routers
    for _ in range(3):
        other.asked("s", chain(7, 8), A, 1.0)
    other.tell(1.0)
    (group,) = leads.view(1.0).groups
    assert group.chain == tuple(chain(7, 8))
    assert (group.model_root, group.tenant_tag, group.session_tag) == (ROOT, "t", "tag-s")
    assert group.uses_per_s == pytest.approx(other.demand.uses_per_s(chain(7)[0], 1.0))


def test_a_move_is_heard_where_the_conversation_is(routers: tuple[Router, Router]) -> None:
    leads, other = routers
    other.asked("s", chain(1), A, 1.0)
    other.tell(1.0)
    leads.views.move([Move("tag-s", B)])
    other.tell(2.0)
    other.tell(3.0)
    (one,) = leads.sessions(3.0).values()
    assert (one.place, one.came_from, one.moved_s) == (B, A, 1.0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(0, 3),
            st.lists(st.integers(0, 1), min_size=1, max_size=4),
        ),
        max_size=30,
    )
)
def test_three_routers_are_as_one_that_sees_it_all(
    asked: list[tuple[int, int, list[int]]],
) -> None:
    board = MemoryRouterViews("0", clock=lambda: 0.0)
    three = [Router(board), Router(board.beside("1")), Router(board.beside("2"))]
    whole = Router(MemoryRouterViews("alone"))
    for at, (router, name, path) in enumerate(asked):
        for one in (three[router], whole):
            one.asked(str(name), chain(*path), A, float(at))
    for one in three[1:]:
        one.tell(50.0)
    expected = whole.view(50.0)
    found = three[0].view(50.0)
    assert [(one.session, list(one.pages), one.idle_s) for one in found.sessions] == [
        (one.session, list(one.pages), one.idle_s) for one in expected.sessions
    ]
    assert all(
        mine.shared >= theirs.shared
        for mine, theirs in zip(found.sessions, expected.sessions, strict=True)
    )
    uses = {one.group: one.uses_per_s for one in expected.groups}
    for group in found.groups:
        # What is asked for less than once in a minute and a half is not told.
        assert group.uses_per_s == pytest.approx(uses[group.group], abs=0.03)


class Counted(Demand):
    """Counts the groups that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def uses_per_s(self, group: PageKey, now_s: float) -> float:
        self.looks += 1
        return super().uses_per_s(group, now_s)


async def test_what_many_routers_see_is_gone_through_with_turns_for_others() -> None:
    demand, known = Counted(), Conversations()
    overview = Overview(Mirror(), dict, demand, known)

    def keys(router: int) -> Iterable[PageKey]:
        return (PageKey(bytes([router, at, *bytes(30)])) for at in range(256))

    views = {
        str(router): RouterView(
            [SeenGroup(key, float(router * 256 + at)) for at, key in enumerate(keys(router))],
            [
                SeenSession(f"{router}-{at}", A, (), at, False, None, 0.0, 0, ROOT)
                for at in range(40)
            ],
        )
        for router in range(32)
    }
    overview.elsewhere.learn(views, 9.0)
    between, steps = list[int](), overview._look({}, 9.0, {}, NO_PREFIXES)
    view: ClusterView | None = None
    while view is None:
        before = demand.looks
        try:
            next(steps)
        except StopIteration as over:
            view = over.value
        between.append(demand.looks - before)
    assert demand.looks == 32 * 256
    assert max(between) <= 512
    assert view == overview.view_at_once({}, 9.0) == await overview.view({}, 9.0)
    assert [one.group for one in view.groups] == list(keys(31))[::-1]
    assert [one.idle_s for one in view.sessions] == sorted([*range(32)] * 32)


def test_who_has_pages_is_shown_of_those_used_most_and_else_nobody_knows() -> None:
    overview = Overview(Mirror(), dict, Demand(), Conversations())
    keys = [PageKey(bytes([at] * 32)) for at in range(40)]
    groups = [SeenGroup(key, 99.0 - at, (key,) if at else ()) for at, key in enumerate(keys)]
    overview.elsewhere.learn({"other": RouterView(groups)}, 9.0)
    shown = overview.view_at_once({}, 9.0).groups
    assert [one.workers for one in shown] == [None, *[()] * 31, *[None] * 8]


class Watches:
    """A policy that keeps what it is shown, and orders what a test says."""

    def __init__(self) -> None:
        self.shown: ClusterView | None = None
        self.orders: list[Order] = []

    def decide(self, view: ClusterView) -> Iterable[Order]:
        self.shown = view
        return list(self.orders)

    @property
    def sessions(self) -> dict[str, SessionView]:
        """Return the conversations that it was shown last, by their tags."""
        return {} if self.shown is None else {one.session: one for one in self.shown.sessions}


async def test_policies_see_and_move_conversations_of_both_routers(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    for name in ("w0", "w1"):
        cluster.mock(name)
    watches = Watches()
    spec = PolicySpec("watches", cast(type[ClusterPolicy], lambda: watches))
    one, other = [await cluster.router(2, policies=PolicySet(replication=spec)) for _ in range(2)]

    async def ask(url: str, session: str) -> str:
        body = {
            "model": "mock",
            "prompt": f"{session}: why is the sky blue? " * 8,
            "max_tokens": 2,
            "session_id": session,
        }
        answer = await http.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-pie-worker"]

    async def both_are_seen() -> list[str]:
        """Ask both routers until the one that leads knows of both conversations; return their workers."""
        for _ in range(200):
            at = [await ask(one.url, "ada"), await ask(other.url, "bob")]
            # What is asked for is forgotten in half a minute, and the lease may be taken late.
            await asyncio.sleep(0.1)
            if len(watches.sessions) == 2:
                return at
        raise AssertionError("it saw only one of them")

    at = await both_are_seen()
    assert sorted(shown.place for shown in watches.sessions.values()) == sorted(at)
    assert watches.shown is not None
    assert len(watches.shown.groups) == 2
    for tag, shown in watches.sessions.items():
        target = PlaceId("w1" if shown.place == "w0" else "w0")
        watches.orders.append(MoveSession(tag, target, "the test wants it"))
    moved = {order.session: order.place for order in watches.orders}  # type: ignore[union-attr]

    def are_moved() -> bool:
        return {tag: shown.place for tag, shown in watches.sessions.items()} == moved

    await until(are_moved)
    # Whichever router led: what it knew itself stays, and the other's is taken back.
    await other.close()
    await until(lambda: len(watches.sessions) == 1)

"""The suite that every implementation of `pie.index.router_views` passes.

Covers the contract: what is told, and until when. Does not cover Redis going away. An implementation is tested by
a subclass:

    class TestMine(RouterViewsConformance):
        @contextmanager
        def routers(self, count: int) -> Iterator[Sequence[RouterViews]]:
            ...

`pass_ttl` lets the time pass after which a router that says nothing is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from pie.index.router_views import (
    MOST_CHAINS,
    MOST_GROUPS,
    MOST_MOVES,
    MOST_PAGES_OF_SESSIONS,
    MOST_SESSION_PAGES,
    MOST_SESSIONS,
    Move,
    RouterView,
    RouterViews,
    SeenGroup,
    SeenSession,
)
from pie.page.events import PlaceId
from pie.page.key import PageKey

W0, W1 = PlaceId("w0"), PlaceId("w1")


def pages(count: int, of: int = 0) -> tuple[PageKey, ...]:
    """Return the pages of a sequence."""
    return tuple(PageKey(of.to_bytes(16, "big") + at.to_bytes(16, "big")) for at in range(count))


def seen(tag: str = "s", count: int = 3, of: int = 0) -> SeenSession:
    """Return a conversation."""
    return SeenSession(tag, W1, pages(count, of), 2.5, True, W0, 1.5, 1, b"root", "tenant")


def group(of: int = 0, chain: int = 2) -> SeenGroup:
    """Return a group that is asked for."""
    return SeenGroup(pages(1, of)[0], 4.5, pages(chain, of), b"root", "tenant", "s", b"its own")


class RouterViewsConformance:
    """Tests of one implementation."""

    def routers(self, count: int) -> AbstractContextManager[Sequence[RouterViews]]:
        """Return so many routers that have said nothing yet."""
        raise NotImplementedError

    def pass_ttl(self) -> None:
        """Let time pass."""
        raise NotImplementedError

    def test_what_one_router_sees_all_others_are_told_whole(self) -> None:
        """Nothing is lost on the way, and nobody is told what it said itself."""
        view = RouterView((group(), SeenGroup(pages(1, 7)[0], 0.5)), (seen(), seen("t", 9, 2)))
        with self.routers(3) as (one, two, three):
            assert one.tell(view) == []
            assert two.tell(RouterView()) == []
            assert list(three.others().values()).count(view) == 1
            assert list(three.others().values()).count(RouterView()) == 1
            assert list(two.others().values()) == [view]
            assert list(one.others().values()) == [RouterView()]

    def test_what_is_told_stands_for_what_was_told_before(self) -> None:
        """A conversation grows, is another's, comes and goes."""
        with self.routers(2) as (one, two):
            for sessions in (
                (seen(),),
                (seen(count=4),),
                (seen(count=4, of=1), seen("t")),
                (seen("t"),),
                (),
                (seen(),),
            ):
                view = RouterView((group(len(sessions)),), sessions)
                one.tell(view)
                assert list(two.others().values()) == [view]

    def test_a_router_that_says_nothing_is_forgotten(self) -> None:
        """It may be dead; and one that comes back is there again."""
        with self.routers(2) as (one, two):
            one.tell(RouterView((), (seen(),)))
            assert two.others()
            self.pass_ttl()
            assert not two.others()
            one.tell(RouterView((), (seen(),)))
            assert list(two.others().values()) == [RouterView((), (seen(),))]

    def test_what_was_taken_back_is_gone_at_once(self) -> None:
        """A router that leads, or leaves, tells nothing."""
        with self.routers(2) as (one, two):
            one.tell(RouterView((), (seen(),)))
            one.withdraw()
            assert not two.others()
            one.withdraw()
            one.tell(RouterView((), (seen(count=5),)))
            assert list(two.others().values()) == [RouterView((), (seen(count=5),))]

    def test_each_router_hears_each_move_once(self) -> None:
        """And none of those before it came."""
        with self.routers(3) as (leads, one, two):
            leads.move([Move("old", W0)])
            assert one.tell(RouterView()) == []
            leads.move([Move("a", W1), Move("b", W0)])
            assert one.tell(RouterView()) == [Move("a", W1), Move("b", W0)]
            assert one.tell(RouterView()) == []
            assert two.tell(RouterView()) == []
            leads.move([])
            leads.move([Move("c", W1)])
            assert one.tell(RouterView()) == [Move("c", W1)]
            assert two.tell(RouterView()) == [Move("c", W1)]

    def test_of_many_moves_the_latest_are_heard(self) -> None:
        """A router that was away for long is not told of all."""
        with self.routers(2) as (leads, one):
            one.tell(RouterView())
            for at in range(0, 2 * MOST_MOVES, 64):
                leads.move([Move(f"s{at + more}", W0) for more in range(64)])
            heard: list[Move] = []
            while some := one.tell(RouterView()):
                heard += some
            assert MOST_MOVES <= len(heard) < 2 * MOST_MOVES
            assert heard[-1] == Move(f"s{2 * MOST_MOVES - 1}", W0)

    def test_a_view_is_bounded(self) -> None:
        """Whatever a router has seen: the latest conversations, the hottest groups, and leading pages."""
        many = RouterView(
            tuple(group(of) for of in range(2 * MOST_GROUPS)),
            (seen("long", 2 * MOST_SESSION_PAGES), *(seen(f"s{at}") for at in range(200))),
        )
        with self.routers(2) as (one, two):
            one.tell(many)
            (told,) = two.others().values()
            assert [one.group for one in told.groups] == [
                one.group for one in many.groups[:MOST_GROUPS]
            ]
            assert [bool(one.chain) for one in told.groups].count(True) == MOST_CHAINS
            assert [one.tag for one in told.sessions] == [
                one.tag for one in many.sessions[:MOST_SESSIONS]
            ]
            assert told.sessions[0].pages == many.sessions[0].pages[:MOST_SESSION_PAGES]

    def test_a_large_view_comes_whole_sooner_or_later(self) -> None:
        """Meanwhile what is there is right."""
        pages = MOST_PAGES_OF_SESSIONS // MOST_SESSIONS
        sessions = tuple(seen(f"s{at}", pages, of=at) for at in range(MOST_SESSIONS))
        with self.routers(2) as (one, two):
            told: Sequence[SeenSession] = ()
            calls = 0
            while told != sessions:
                calls += 1
                assert calls < 2 * MOST_SESSIONS
                one.tell(RouterView((), sessions))
                ((_, told),) = [(v.groups, v.sessions) for v in two.others().values()]
                assert set(told) <= set(sessions)

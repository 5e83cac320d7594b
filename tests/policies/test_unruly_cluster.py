"""Cluster policies whose orders and errors do harm themselves: they are told of, and asked again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import overload

import msgspec
import pytest

from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.cluster_manager import Asked, ClusterEvent, ClusterManager
from pie.policies.cluster_policy import (
    ClusterView,
    FetchPages,
    LetGo,
    MoveSession,
    Order,
    SetCopies,
    StorePages,
)
from pie.policies.proposed_orders import MOST_CHARS
from pie.policies.steps import at_once
from pie.router.aside import AskedAside
from tests.policies.pages import Held, key, round_of

W0 = PlaceId("worker-0")
VIEW = ClusterView(4, 1, (), 0.0)


class BadPages(Sequence[PageKey]):
    """Pages that cannot be looked at."""

    def __len__(self) -> int:
        return 3

    @overload
    def __getitem__(self, at: int) -> PageKey: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[PageKey]: ...
    def __getitem__(self, at: int | slice) -> PageKey | Sequence[PageKey]:
        raise RuntimeError("no page")


class UntoldError(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


class BadName(str):
    """A name that cannot be compared."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no name")

    def __hash__(self) -> int:
        raise RuntimeError("no name")


class Says:
    """A policy that orders, or raises, one thing."""

    def __init__(self, said: object) -> None:
        self.said = said

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        if isinstance(self.said, BaseException):
            raise self.said
        return [self.said]  # type: ignore[list-item]


UNRULY = {
    "an error without text": UntoldError(),
    "pages that raise": StorePages(W0, BadPages(), "r"),
    "an empty key": StorePages(W0, (PageKey(b""),), "r"),
    "an empty key among others": FetchPages(W0, [key(1), PageKey(b"")], "r"),
    "a key that is too long": LetGo(W0, (key(1), PageKey(bytes(33))), "r"),
    "a group that is no key": SetCopies(PageKey(b"g"), 2, "r"),
    "an order without fields": object.__new__(StorePages),
    "a number of 5,001 digits": SetCopies(key(1), 10**5000, "r"),
}


@pytest.mark.parametrize("said", UNRULY.values(), ids=UNRULY)
async def test_an_unruly_policy_is_told_of_and_asked_again(said: object) -> None:
    manager, aside = ClusterManager([("says", Says(said))]), AskedAside(1)
    asked: list[Asked] = []
    for _ in range(2):
        asked, late = await aside.ask([lambda: manager.ask(0, VIEW)], 60.0)
        assert late == []
        (one,) = asked
        assert not one.orders
        assert len(one.failures) == 1
    events = at_once(manager.disposing(asked, VIEW, {}, Held())).events
    assert [event.action for event in events] == ["fail"]


async def test_a_question_that_raises_is_answered() -> None:
    def question() -> Asked:
        raise UntoldError

    asked, late = await AskedAside(1).ask([question], 60.0)
    assert late == []
    ((failure,),) = (one.failures for one in asked)
    assert failure.startswith(f"UntoldError at {__file__}:")


def test_a_name_that_raises_is_taken_for_what_it_says() -> None:
    manager = ClusterManager([("says", Says(MoveSession(BadName("s"), W0, "r")))])
    (event,) = round_of(manager, VIEW, {}, Held()).events
    assert (event.action, event.reason) == ("refuse", "there is no conversation s (r)")


@pytest.mark.parametrize("reason", ["R" * 5_000_000, "\ud800" * 1000, "bad \ud800 reason"])
def test_an_event_is_short_and_can_be_written(reason: str) -> None:
    order = MoveSession(reason, PlaceId(reason), reason)
    (event,) = round_of(ClusterManager([("says", Says(order))]), VIEW, {}, Held()).events
    assert event.action == "refuse"
    assert len(event.reason) <= MOST_CHARS
    assert len(event.place) <= MOST_CHARS
    assert msgspec.json.encode([event.reason, event.place])
    short = ClusterEvent("p", "refuse", None, 0, "bad \ud800 reason")
    assert short.reason == "bad \\ud800 reason"


def test_copies_that_are_not_in_force_any_more_are_ordered_anew() -> None:
    manager = ClusterManager([("says", Says(SetCopies(key(1), 3, "hot")))])
    assert round_of(manager, VIEW, {}, Held()).table == {key(1): 3}
    assert round_of(manager, VIEW, {}, Held()).table == {key(1): 3}


class Moves:
    """Moves many conversations that are not there, each with a reason of its own to be refused."""

    def decide(self, view: ClusterView) -> Iterable[Order]:
        return [MoveSession(f"nobody-{number}", W0, "why not") for number in range(500)]


def test_orders_refused_for_a_reason_each_leave_room_for_others_events() -> None:
    manager = ClusterManager([("many", Moves()), ("other", Moves())])
    events = round_of(manager, VIEW, {}, Held({}, 0)).events
    assert [sum(one.policy == name for one in events) for name in ("many", "other")] == [17, 17]
    assert events[16].reason.startswith("there is no conversation nobody-16")
    assert "; 483 more for this or another reason (why not)" in events[16].reason
    assert not round_of(manager, VIEW, {}, Held({}, 0)).events

"""What cluster policies are shown is one view for all of them, and none can change it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from pie.index.mirror import Mirror
from pie.page.events import PlaceId, PlaceKind
from pie.policies.cluster_manager import ClusterManager
from pie.policies.cluster_policy import (
    ClusterView,
    GroupView,
    LetGo,
    Order,
    PlaceView,
    SessionView,
    Wanted,
)
from pie.policies.expire import Expire
from pie.policies.prefixes import NamedPages, NamedPrefix, Prefixes
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.overview import Overview
from tests.policies.pages import Held, key, round_of

W0 = PlaceId("w0")


class Does:
    """A policy that does something to what it is shown."""

    def __init__(self, does: Callable[[Any], Any]) -> None:
        self._does = does

    def decide(self, view: ClusterView) -> Iterable[Order]:
        self._does(view)
        return ()


def shown(copies: int = 1) -> ClusterView:
    """Return a view as it may be put together: of lists and dicts."""
    group = GroupView(key(1), 1.0, copies, [key(1)], [W0])
    places = [PlaceView(W0, PlaceKind.WORKER, model_root=b"m", page_bytes=100)]
    session = SessionView("t", W0, None, 999.0, 999.0, [key(1), key(2)], {W0: 2}, model_root=b"m")
    wanted, prefixes = {"m": Wanted(1, "r")}, {"p": NamedPages(frozenset([key(1)]))}
    return ClusterView(2, 1, [group], 0.0, places, [session], wanted, prefixes)


CHANGES: list[Callable[[Any], Any]] = [
    lambda view: view.groups.clear(),
    lambda view: view.places.clear(),
    lambda view: view.sessions.clear(),
    lambda view: view.wanted.clear(),
    lambda view: view.wanted.update(m="boom"),
    lambda view: view.prefixes.clear(),
    lambda view: view.groups[0].chain.clear(),
    lambda view: view.groups[0].workers.clear(),
    lambda view: view.sessions[0].pages.clear(),
    lambda view: view.sessions[0].held.clear(),
    lambda view: view.prefixes["p"].pages.clear(),
]


def overwrite(view: ClusterView) -> None:
    """Change all that is shown, as no policy should."""
    parts: list[Any] = [*view.groups, *view.places, *view.sessions, *view.wanted.values()]
    for part in [*parts, *view.prefixes.values(), view]:
        for name in part.__slots__:
            object.__setattr__(part, name, None)
    raise ValueError("all is changed")


CHANGES.append(overwrite)


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("does", CHANGES)
def test_the_others_are_heard_all_the_same(does: Callable[[Any], Any], copies: int) -> None:
    view = shown(copies)
    manager = ClusterManager([("mine", Does(does)), ("expire", Expire(1.0))])
    decision = round_of(manager, view, {key(1): 2} if copies == 2 else {}, Held({"w0": 2}, 2))
    assert manager.failures == [1, 0]
    assert [type(one.order) for one in decision.given] == [LetGo]
    assert view == shown(copies)


def test_what_is_told_of_workers_wanted_is_no_policys_to_change() -> None:
    told = {"m": Wanted(1, "r")}
    view = Overview(Mirror(), dict, Demand(), Conversations()).view_at_once({}, 0.0, told)
    with pytest.raises(TypeError):
        view.wanted["m"] = "boom"  # type: ignore[index]
    told["n"] = Wanted(2, "s")
    assert list(view.wanted) == ["m"]


def test_named_prefixes_are_put_together_once_and_for_good() -> None:
    prefixes = Prefixes({"p": NamedPrefix(key="ab" * 32)})
    assert prefixes.by_name() is prefixes.by_name()
    assert ClusterView(1, 1, (), 0.0, prefixes=prefixes.by_name()).prefixes is prefixes.by_name()
    with pytest.raises(TypeError):
        prefixes.by_name()["q"] = NamedPages(frozenset())  # type: ignore[index]

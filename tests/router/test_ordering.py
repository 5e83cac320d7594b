"""Orders on their way: how long their answers are waited for, and a last look before pages go."""

from __future__ import annotations

from typing import cast

import pytest

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_manager import Given
from pie.policies.cluster_policy import FetchPages, LetGo, StorePages
from pie.policies.order_checks import PageOrder
from pie.policies.order_limits import MOST_WAITING, ORDER_S
from pie.router.link import WorkerLink
from pie.router.nodes import NodeSet
from pie.router.ordering import Ordering
from pie.wire.messages import Message
from pie.wire.orders import ChangeResult, PageChange, RemovePages
from pie.wire.place_orders import PagesMoved
from tests.policies.pages import Held
from tests.router.conftest import until

W0 = PlaceId("w0")
PAGES = (PageKey(b"p" * 32),)


class Link:
    """A worker that does what it is told at once, and notes how long it would have had."""

    class record:  # noqa: N801 - as a link's
        epoch = 1

    def __init__(self) -> None:
        self.limits_s: list[float] = []

    async def order(self, message: Message, *, timeout_s: float) -> PagesMoved:
        self.limits_s.append(timeout_s)
        return PagesMoved("", 1, 0)


@pytest.mark.parametrize("order", [StorePages, FetchPages, LetGo])
async def test_an_order_that_is_last_of_all_at_its_worker_is_waited_for(
    order: type[PageOrder],
) -> None:
    link = Link()
    ordering = Ordering(lambda: {W0: cast(WorkerLink, link)})
    ordering.send(Given("says", order(W0, PAGES, "x")))
    await until(lambda: bool(link.limits_s))
    assert link.limits_s[0] > MOST_WAITING * ORDER_S
    await ordering.close()


class Nodes(NodeSet):
    """Pool nodes that remove what they are told; notes what that is."""

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[PageKey] = []

    async def request(self, record: PlaceRecord, message: Message, timeout_s: float) -> Message:
        assert isinstance(message, RemovePages)
        self.removed += dict.fromkeys(PageKey(key) for key, _ in message.pages)
        return ChangeResult("", (PageChange.DONE,) * len(message.pages))


@pytest.mark.parametrize(
    ("also_last", "removed", "left"), [(False, 2, 2), (True, 4, 0)], ids=["a look", "no look"]
)
async def test_a_pool_node_keeps_what_workers_have_let_go_of_since_it_was_ordered(
    *, also_last: bool, removed: int, left: int
) -> None:
    pages = [PageKey(bytes([at]) * 32) for at in range(5)]
    records = {
        PlaceId(name): PlaceRecord(
            PlaceId(name), Epoch(1), kind=kind, address="ipc:///nowhere", draining=name == "w1"
        )
        for name, kind in (
            ("w0", PlaceKind.WORKER),
            ("w1", PlaceKind.WORKER),
            ("pool-0", PlaceKind.POOL),
        )
    }
    nodes = Nodes()
    # The one that has them all is about to leave.
    ordering = Ordering(dict, lambda: records, nodes, Held({"w0": 3, "w1": 5}))
    order = LetGo(PlaceId("pool-0"), pages, "x", start=1, also_last=also_last)
    ordering.send(Given("says", order))
    await until(lambda: not ordering._tasks)
    assert nodes.removed == pages[1 : 1 + removed]
    (told,) = ordering.take_told()
    assert (told.action, told.pages) == ("done", removed)
    assert told.reason == ("let go, 2 are left" if left else "let go")
    await ordering.close()

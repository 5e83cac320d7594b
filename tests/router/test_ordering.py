"""Orders on their way: how long their answers are waited for."""

from __future__ import annotations

from typing import cast

import pytest

from pie.page.events import PlaceId
from pie.page.key import PageKey
from pie.policies.cluster_manager import Given
from pie.policies.cluster_policy import FetchPages, LetGo, StorePages
from pie.policies.order_checks import PageOrder
from pie.policies.order_limits import MOST_WAITING, ORDER_S
from pie.router.link import WorkerLink
from pie.router.ordering import Ordering
from pie.wire.messages import Message
from pie.wire.place_orders import PagesMoved
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

"""Orders to places to leave, and to workers about pages that they have, or are to have.

Covers the orders and their answers. Does not cover orders to pool nodes (`pie.wire.orders`), all other messages
(`pie.wire.messages`) or what a worker does (`pie.worker.orders`). Pages are named from the first one of their
sequence on, so that the group of each is known.
"""

from __future__ import annotations

import msgspec

from pie.page.events import Epoch
from pie.page.key import PageKey


class StoreInPool(msgspec.Struct, frozen=True, tag="store_in_pool"):
    """Store in the pool what you have of these pages and it does not. Answered by `PagesMoved`."""

    request_id: str
    epoch: Epoch
    pages: tuple[PageKey, ...]


class BringNear(msgspec.Struct, frozen=True, tag="bring_near"):
    """Bring these pages from the pool into your host memory. Answered by `PagesMoved`."""

    request_id: str
    epoch: Epoch
    pages: tuple[PageKey, ...]


class LetGoOf(msgspec.Struct, frozen=True, tag="let_go_of"):
    """Let go of those of these pages that nobody uses, in every tier. Answered by `PagesMoved`."""

    request_id: str
    epoch: Epoch
    pages: tuple[PageKey, ...]
    start: int = 0
    """Where in `pages` those begin that are to go."""
    also_last: bool = False
    """Whether pages go too that the pool does not have."""


class PagesMoved(msgspec.Struct, frozen=True, tag="pages_moved"):
    """What became of an order about pages."""

    request_id: str
    pages: int
    """Pages that were stored, brought or let go."""
    left: int
    """Pages that should have been and were not."""
    bytes: int = 0
    """What moved."""


class DrainNode(msgspec.Struct, frozen=True, tag="drain"):
    """Take no more pages and hand those that you have to other nodes. Answered by `Drained`.

    A worker takes no more requests, and stores in the pool what only it has.
    """

    request_id: str
    epoch: Epoch
    timeout_s: float
    """How long that may take."""


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """A node is as empty as it could be made. One that `pie pool` runs ends then."""

    request_id: str
    moved: int
    """Pages that other nodes, or the pool, took."""
    left: int
    """Pages that nobody took in time."""


class TakeAgain(msgspec.Struct, frozen=True, tag="take_again"):
    """Take requests again, as before a `DrainNode`; a worker alone does. Answered by `TakesAgain` or `Refused`."""

    request_id: str
    epoch: Epoch


class TakesAgain(msgspec.Struct, frozen=True, tag="takes_again"):
    """A worker takes requests."""

    request_id: str

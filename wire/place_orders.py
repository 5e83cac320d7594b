"""Orders to workers about pages that they have, or are to have.

Covers the orders and their answer. Does not cover orders to pool nodes (`pie.wire.orders`), all other messages
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

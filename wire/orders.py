"""Messages about pages that a pool node holds already: remove them, pin them, let them go.

Covers the orders and their answer. Does not cover all other messages (`pie.wire.messages`) or what a node
does (`pie.pool.serving`).
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

from pie.page.events import Epoch
from pie.page.key import PageKey


class RemovePages(msgspec.Struct, frozen=True, tag="remove"):
    """Let go of these pages in every tier, now. Answered by `ChangeResult`."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]


class PinPages(msgspec.Struct, frozen=True, tag="pin"):
    """Keep these pages in RAM for a time. Answered by `ChangeResult`."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    """A node may cap it. Who wants them longer asks again."""


class UnpinPages(msgspec.Struct, frozen=True, tag="unpin"):
    """End the pins of these pages. Answered by `ChangeResult`."""

    request_id: str
    epoch: Epoch
    pages: tuple[tuple[PageKey, int], ...]


class PageChange(enum.IntEnum):
    """What became of an order about a page."""

    DONE = 0
    NOT_HELD = 1
    """It is not there; or, to unpin it, not pinned."""
    IN_USE = 2
    """It is pinned, being sent or being written: ask again later."""
    FULL = 3
    """So much is pinned already that no more may be, or RAM has no room for it."""
    FAILED = 4
    """A node did not answer, so that nothing is known."""


class ChangeResult(msgspec.Struct, frozen=True, tag="changed"):
    """A `PageChange` for each page, in order."""

    request_id: str
    changes: tuple[int, ...]

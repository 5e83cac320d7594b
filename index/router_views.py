"""What routers tell each other of what is asked for and where conversations are.

Covers the contract, and an implementation in one process; `pie.index.router_views_conformance` is the suite that
both pass. Does not cover Redis (`pie.index.router_views_redis`) or what is made of it (`pie.router.elsewhere`).

The router whose cluster policies run asks what the others see, and tells them which conversations it has moved.
The others tell what they see about once a second. One that tells nothing for `TTL_S` is forgotten.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from pie.page.events import PlaceId
from pie.page.key import PageKey

TTL_S = 5.0
MOST_GROUPS = 256
MOST_CHAINS = 32
"""Groups that are told with the pages of a prompt that holds them."""
MOST_SESSIONS = 128
MOST_CHAIN_PAGES = 1_024
MOST_SESSION_PAGES = 16_384
"""Of one conversation."""
MOST_PAGES_OF_SESSIONS = MOST_SESSIONS * 2_048
"""Of all conversations of a view together; of those used longest ago the last pages are left out."""
MOST_MOVES = 1_024
"""Of moves so many of the latest are kept: those of one round."""
MOST_ROUTERS = 256


class SeenGroup(NamedTuple):
    """How often a group of pages is asked for at one router."""

    group: PageKey
    uses_per_s: float
    chain: Sequence[PageKey] = ()
    """The pages of a prompt that holds it, from the first one up to the group's last, where they are told."""
    model_root: bytes = b""
    tenant_tag: str = ""
    session_tag: str = ""
    root: bytes = b""
    """What the key of the chain's first page is made of: its tenant's root."""


class SeenSession(NamedTuple):
    """A conversation as one router knows it. Times are how long ago something was, when it was told."""

    tag: str
    place: PlaceId
    pages: Sequence[PageKey]
    """From its first one on."""
    used_s: float
    """When its latest request came, or its answer was over."""
    is_running: bool = False
    came_from: PlaceId | None = None
    moved_s: float = 0.0
    shared: int = 0
    """Leading pages that another conversation of that router has too."""
    model_root: bytes = b""
    tenant_tag: str = ""


class Move(NamedTuple):
    """A conversation that another worker has from now on."""

    tag: str
    place: PlaceId


@dataclass(frozen=True, slots=True)
class RouterView:
    """What one router sees; beyond the limits of this module nothing is told."""

    groups: Sequence[SeenGroup] = ()
    """Those used most, the most used in front."""
    sessions: Sequence[SeenSession] = ()
    """The latest ones, the one used last in front."""


class RouterViews(Protocol):
    """What routers see, from one of them. Blocks; for one thread at a time.

    Every method raises `PageIndexError` where nothing is known.
    """

    def tell(self, view: RouterView) -> list[Move]:
        """Say what this router sees, instead of what it said before.

        Returns the moves since the last call, or of none before the first. Large views come to others in parts: what
        is not there yet is left out.
        """
        ...

    def others(self) -> Mapping[str, RouterView]:
        """Return what the other routers said last that are there."""
        ...

    def move(self, moves: Sequence[Move]) -> None:
        """Tell the other routers of conversations that were moved."""
        ...

    def withdraw(self) -> None:
        """Take back what this router said."""
        ...

    def close(self) -> None:
        """Withdraw, and let go of what is held."""
        ...


@dataclass(slots=True)
class _Board:
    views: dict[str, tuple[RouterView, float]] = field(default_factory=dict)
    moves: deque[Move] = field(default_factory=lambda: deque(maxlen=MOST_MOVES))
    moved: int = 0


class MemoryRouterViews:
    """What routers of one process see.

    Args:
        router: What this router is called.
        clock: Seconds, from anywhere, going forward.
        board: Where they tell; `beside` shares it.
    """

    def __init__(
        self,
        router: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        board: _Board | None = None,
    ) -> None:
        self._router = router
        self._clock = clock
        self._board = board or _Board()
        self._heard: int | None = None

    def beside(self, router: str) -> Self:
        """Return another router's."""
        return type(self)(router, clock=self._clock, board=self._board)

    def tell(self, view: RouterView) -> list[Move]:
        """Do as `RouterViews.tell` says."""
        board = self._board
        board.views[self._router] = (bounded(view), self._clock())
        new = 0 if self._heard is None else min(board.moved - self._heard, len(board.moves))
        self._heard = board.moved
        return list(board.moves)[len(board.moves) - new :]

    def others(self) -> dict[str, RouterView]:
        """Do as `RouterViews.others` says."""
        views, now_s = self._board.views, self._clock()
        for router in [name for name, (_, at_s) in views.items() if now_s - at_s >= TTL_S]:
            del views[router]
        return {name: view for name, (view, _) in views.items() if name != self._router}

    def move(self, moves: Sequence[Move]) -> None:
        """Do as `RouterViews.move` says."""
        self._board.moves.extend(moves)
        self._board.moved += len(moves)

    def withdraw(self) -> None:
        """Do as `RouterViews.withdraw` says."""
        self._board.views.pop(self._router, None)

    def close(self) -> None:
        """Do as `RouterViews.close` says."""
        self.withdraw()


def bounded(view: RouterView) -> RouterView:
    """Return what of a view is told."""
    chains = 0
    groups: list[SeenGroup] = []
    for group in view.groups[:MOST_GROUPS]:
        chains += bool(group.chain)
        chain = group.chain[:MOST_CHAIN_PAGES] if chains <= MOST_CHAINS else ()
        groups.append(group._replace(chain=tuple(chain)))
    sessions: list[SeenSession] = []
    room = MOST_PAGES_OF_SESSIONS
    for one in view.sessions[:MOST_SESSIONS]:
        pages = tuple(one.pages[: min(room, MOST_SESSION_PAGES)])
        room -= len(pages)
        sessions.append(one._replace(pages=pages))
    return RouterView(tuple(groups), tuple(sessions))

"""Policies over the whole cluster: what they are shown, and what they may order.

Covers views, of which no part can be changed, and orders. Does not cover who gathers views
(`pie.router.overview`), which orders are carried out (`pie.policies.cluster_manager`) or how
(`pie.index.orders`, `pie.pool.migration`, `pie.worker.orders`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar

from pie.page.events import PlaceId, PlaceKind
from pie.page.key import PageKey
from pie.policies.prefixes import NamedPages

K = TypeVar("K")
V = TypeVar("V")


def _fixed(mapping: Mapping[K, V]) -> Mapping[K, V]:
    """Return a mapping that nobody can change; one that is read-only already as it is."""
    return mapping if type(mapping) is MappingProxyType else MappingProxyType(dict(mapping))


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group of consecutive pages, which the pool keeps together."""

    group: PageKey
    """The key of its first page."""
    uses_per_s: float
    """How often prompts that hold its pages have come lately."""
    copies: int
    """How many pool nodes are to keep it now, as far as the policy that is shown this has ordered."""
    chain: Sequence[PageKey] = ()
    """The pages of a prompt that holds it, from the first one up to the group's last; empty where they
    are not known."""
    workers: Sequence[PlaceId] | None = None
    """Workers that hold all of `chain`; None where that is not known, as of all but the groups used most."""
    model_root: bytes = b""
    tenant_tag: str = ""
    """Whose prompt held it last; empty for no tenant's."""
    session_tag: str = ""
    """Which conversation's that was; empty for none."""
    prefixes: frozenset[str] = frozenset()
    """The named prefixes that its first page belongs to, whichever tenant's it is."""

    def __post_init__(self) -> None:
        """Take sequences as tuples: several policies see one view, on a thread each."""
        object.__setattr__(self, "chain", tuple(self.chain))
        if self.workers is not None:
            object.__setattr__(self, "workers", tuple(self.workers))


@dataclass(frozen=True, slots=True)
class PlaceView:
    """A worker or a pool node that is up."""

    place: PlaceId
    kind: PlaceKind
    draining: bool = False
    """Whether it is about to leave and takes nothing more."""
    model_root: bytes = b""
    """Of a worker: whose pages it can use."""
    page_bytes: int = 0
    """Of a worker: the size of a page."""
    pages: int = 0
    """Pages in a worker's device memory."""
    total_pages: int = 0
    """Room for pages in a worker's device memory; 0 for a pool node."""
    used_share: float = 0.0
    """How much of it running requests use."""
    waiting: int = 0
    """Requests there without a token yet."""
    running: int = 0
    """Sequences in decode."""
    has_host: bool = False
    """Whether a worker keeps pages in host memory, so that pages can be brought near it."""
    model: str = ""
    """Of a worker: what clients call its model."""
    wait_s: float = 0.0
    """How long a worker has to compute until the prompts that wait there are done."""

    @property
    def filled(self) -> float:
        """How much of device memory holds pages, used now or not, from 0 to 1."""
        return self.pages / self.total_pages if self.total_pages else 0.0

    @property
    def busy(self) -> int:
        """Requests that it has."""
        return self.waiting + self.running

    @property
    def takes_sessions(self) -> bool:
        """Whether conversations may go there."""
        return self.kind is PlaceKind.WORKER and not self.draining


@dataclass(frozen=True, slots=True)
class SessionView:
    """A conversation that a router has seen lately."""

    session: str
    """Its tag, as its pages have it."""
    place: PlaceId
    """The worker that has it: where its latest request went, or where it was moved since."""
    came_from: PlaceId | None
    """The worker that had it before; None where there is none."""
    moved_s: float
    """How long ago it came from there, in seconds."""
    idle_s: float
    """How long its latest answer has been over; 0 while it runs."""
    pages: Sequence[PageKey]
    """Its pages from the first one on, as far as known."""
    held: Mapping[PlaceId, int] = field(default_factory=dict)
    """By worker how many leading pages it has, in any tier."""
    pooled: int = 0
    """Leading pages that pool nodes have."""
    shared: int = 0
    """Leading pages that another conversation has too."""
    model_root: bytes = b""
    tenant_tag: str = ""

    def __post_init__(self) -> None:
        """Take what has parts as what cannot be changed."""
        object.__setattr__(self, "pages", tuple(self.pages))
        object.__setattr__(self, "held", _fixed(self.held))


@dataclass(frozen=True, slots=True)
class Wanted:
    """How many workers a model is to have, as a policy said."""

    workers: int
    reason: str
    policy: str = ""


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster at one moment."""

    nodes: int
    """Pool nodes that take pages."""
    least_copies: int
    """How many nodes keep a page that no policy says more of."""
    groups: Sequence[GroupView]
    """The ones used most, and all that have more copies than `least_copies`; most used in front."""
    now_s: float
    places: Sequence[PlaceView] = ()
    sessions: Sequence[SessionView] = ()
    """The latest ones, the one used last in front."""
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    """How many workers models are to have as was said last, by what clients call the model."""
    prefixes: Mapping[str, NamedPages] = field(default_factory=dict)
    """The pages of the prefixes that the policy file names, without a salt."""

    def __post_init__(self) -> None:
        """Take what has parts as what cannot be changed."""
        for name in ("groups", "places", "sessions"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "wanted", _fixed(self.wanted))
        object.__setattr__(self, "prefixes", _fixed(self.prefixes))

    def place(self, name: PlaceId) -> PlaceView | None:
        """Return a place; None where it is not up."""
        return next((one for one in self.places if one.place == name), None)

    def workers(self, model_root: bytes | None = None) -> list[PlaceView]:
        """Return workers that conversations may go to, of one model or all; the least busy in front."""
        found = [
            one
            for one in self.places
            if one.takes_sessions and model_root in (None, one.model_root)
        ]
        return sorted(found, key=lambda one: (one.busy, one.filled, one.place))


def apart(view: ClusterView) -> ClusterView:
    """Return the same view, made of parts of its own: a policy that gets round their being frozen changes no other's."""
    whole = _apart(view)
    for name in ("groups", "places", "sessions"):
        object.__setattr__(whole, name, tuple(map(_apart, getattr(view, name))))
    for name in ("wanted", "prefixes"):
        parts = {key: _apart(one) for key, one in getattr(view, name).items()}
        object.__setattr__(whole, name, MappingProxyType(parts))
    return whole


def _apart(part: V) -> V:
    """Return a view with the same in its fields."""
    kind = type(part)
    other = object.__new__(kind)
    for name in kind.__slots__:  # type: ignore[attr-defined]  # views are dataclasses with slots
        object.__setattr__(other, name, getattr(part, name))
    return other


@dataclass(frozen=True, slots=True)
class SetCopies:
    """Let so many pool nodes keep a group from now on; of several policies the largest number counts."""

    group: PageKey
    copies: int
    reason: str
    """Why, in a few words; it is kept in the log of events."""


@dataclass(frozen=True, slots=True)
class StorePages:
    """Let a worker store in the pool what it has of these pages and the pool does not."""

    place: PlaceId
    pages: Sequence[PageKey]
    """Those of a sequence, from its first one on."""
    reason: str


@dataclass(frozen=True, slots=True)
class FetchPages:
    """Let a worker bring these pages from the pool into its host memory."""

    place: PlaceId
    pages: Sequence[PageKey]
    """Those of a sequence, from its first one on."""
    reason: str


@dataclass(frozen=True, slots=True)
class LetGo:
    """Let a place let go of pages that nobody uses now."""

    place: PlaceId
    pages: Sequence[PageKey]
    reason: str
    start: int = 0
    """Where in `pages`, which are those of a sequence from its first one on, those begin that go."""
    also_last: bool = False
    """Whether pages go too that no other place has."""


@dataclass(frozen=True, slots=True)
class MoveSession:
    """Let another worker have a conversation: its next request goes there, all else being equal."""

    session: str
    place: PlaceId
    reason: str


@dataclass(frozen=True, slots=True)
class WantWorkers:
    """Say how many workers a model should have. It is a hint, for whoever starts and stops workers.

    It holds for ten seconds, so that a policy says it in every round.
    """

    model: str
    """What clients call it."""
    workers: int
    reason: str


Order = SetCopies | StorePages | FetchPages | LetGo | MoveSession | WantWorkers
"""What a policy may order."""


class ClusterPolicy(Protocol):
    """Orders what is to change. Decides without I/O; asked about once a second, on one router."""

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return orders, the most urgent in front; none where all is well."""
        ...


class FixedWorkers:
    """Says nothing of how many workers there should be."""

    def decide(self, view: ClusterView) -> Iterable[Order]:  # noqa: ARG002 - it says nothing
        """Return nothing."""
        return ()


class FixedCopies:
    """Orders nothing: every page has as many copies as the configuration says."""

    def decide(self, view: ClusterView) -> Iterable[Order]:  # noqa: ARG002 - it is fixed
        """Return nothing."""
        return ()

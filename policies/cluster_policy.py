"""Policies over the whole cluster: what they are shown, and what they may order.

Covers frozen views and orders. Does not cover who gathers views (`pie.router.demand`), which orders are
carried out (`pie.policies.cluster_manager`) or how (`pie.index.orders`, `pie.pool.migration`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pie.page.key import PageKey


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group of consecutive pages, which the pool keeps together."""

    group: PageKey
    """The key of its first page."""
    uses_per_s: float
    """How often prompts that hold its pages have come lately."""
    copies: int
    """How many pool nodes are to keep it now."""


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


@dataclass(frozen=True, slots=True)
class SetCopies:
    """Let so many pool nodes keep a group from now on."""

    group: PageKey
    copies: int
    reason: str
    """Why, in a few words; it is kept in the log of events."""


class ClusterPolicy(Protocol):
    """Orders what is to change. Decides without I/O; asked about once a second, on one router."""

    def decide(self, view: ClusterView) -> Iterable[SetCopies]:
        """Return orders, the most urgent in front; none where all is well."""
        ...


class FixedCopies:
    """Orders nothing: every page has as many copies as the configuration says."""

    def decide(self, view: ClusterView) -> Iterable[SetCopies]:  # noqa: ARG002 - it is fixed
        """Return nothing."""
        return ()

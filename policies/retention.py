"""What a retention policy is: fed events about pages, asked which should leave.

Covers the contract and the views it sees. Does not cover what is allowed to leave: the manager
(`pie.policies.manager`) keeps pins, sizes and refusals.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pie.page.events import Part, Tier
from pie.page.key import PageKey, RootKey

NO_ROOT = RootKey(b"")


@dataclass(frozen=True, slots=True)
class PageView:
    """What a policy may know of a page."""

    key: PageKey
    parent: bytes
    """The key before it in its sequence, or its root."""
    index: int
    """Its place in its sequence, counted in pages from 0."""
    part: Part
    tier: Tier
    bytes: int
    tenant_tag: str = ""
    session_tag: str = ""
    """Stands for the conversation whose request computed it; empty where it named none."""
    model_root: RootKey = NO_ROOT
    page_tokens: int = 0


class RetentionPolicy(Protocol):
    """Chooses victims among the pages of one tier at one place.

    A policy decides without I/O: time comes in as `now_s`, from any clock that only goes forward.
    """

    def stored(self, page: PageView, now_s: float) -> None:
        """Learn that `page` is held from now on."""

    def hit(self, key: PageKey, part: Part, now_s: float) -> None:
        """Learn that a held page was used."""

    def removed(self, key: PageKey, part: Part) -> None:
        """Learn that a page is no longer held, whoever decided it."""

    def victims(self, bytes_needed: int, now_s: float) -> Iterable[tuple[PageKey, Part]]:
        """Propose pages to remove, best first; the manager takes as many as it needs.

        Proposing changes nothing: what really leaves comes back through `removed`.
        """
        ...


@runtime_checkable
class SeesPins(Protocol):
    """What a retention policy may have besides: it learns which of its pages are in use, and so cannot leave.

    Pins count, and only the first and the last of a page are told; one that is removed has none any more.
    """

    def pinned(self, key: PageKey, part: Part) -> None:
        """Learn that a held page is in use from now on."""

    def unpinned(self, key: PageKey, part: Part) -> None:
        """Learn that a held page is in use no longer."""


def seeing_pins(policy: object) -> SeesPins | None:
    """Return a policy where its class wants to learn of pins."""
    # What an instance has may be data of the same name, and may say that it is of another type.
    return policy if issubclass(type(policy), SeesPins) else None  # type: ignore[return-value]

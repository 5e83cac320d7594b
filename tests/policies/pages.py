"""Small pages for tests of policies: a key is a number, in its first bytes, by which tables tell keys apart."""

from collections.abc import Mapping, Sequence

from pie.page.events import Part, PlaceId, Tier
from pie.page.key import KEY_BYTES, PageKey
from pie.policies.cluster_manager import ClusterManager, Decision
from pie.policies.cluster_policy import ClusterView
from pie.policies.order_checks import HeldPages, Holders
from pie.policies.retention import PageView
from pie.policies.steps import at_once

_NUMBER_BYTES = 4


def key(number: int) -> PageKey:
    return PageKey(number.to_bytes(_NUMBER_BYTES, "big").ljust(KEY_BYTES, b"\0"))


def number(page: tuple[PageKey, Part]) -> int:
    return int.from_bytes(page[0][:_NUMBER_BYTES], "big")


def view(at: int, parent: int | None = None, *, size: int = 1, part: Part = Part.FULL) -> PageView:
    before = key(parent) if parent is not None else b"root"
    return PageView(key(at), before, 0, part, Tier.DEVICE, size)


class Held:
    """Who has pages, as a test says: by worker and in the pool, leading pages of whatever is asked for."""

    def __init__(self, held: Mapping[str, int] | None = None, pooled: int = 0) -> None:
        self._held = {PlaceId(place): count for place, count in (held or {}).items()}
        self._pooled = pooled

        self.looks = 0
        """How often it was asked."""

    def held(self, pages: Sequence[PageKey]) -> HeldPages:
        self.looks += 1
        workers = {place: min(count, len(pages)) for place, count in self._held.items()}
        return HeldPages(workers, min(self._pooled, len(pages)))


def round_of(
    manager: ClusterManager, shown: ClusterView, table: Mapping[PageKey, int], holders: Holders
) -> Decision:
    """Run a round as a router does, and keep what comes of it."""
    manager.inherit(table)
    asked = [manager.ask(at, manager.shown(at, shown)) for at in range(len(manager.names))]
    decision = at_once(manager.disposing(asked, shown, table, holders))
    manager.keep(decision)
    return decision

"""What the manager of cluster policies remembers from one round for the next.

Covers copies of it, one for each round, so that a round of which nothing comes leaves no trace. Pure. Does not cover
what is decided with it (`pie.policies.cluster_manager`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pie.page.events import PlaceKind
from pie.page.key import PageKey
from pie.policies.cluster_policy import ClusterPolicy
from pie.policies.hints import Hints
from pie.policies.order_limits import AGAIN_S, BYTES_PER_S
from pie.policies.wishes import Wishes

QUIET_S = 60.0
"""How long refusals for one reason are not told again."""
_MOST_REMEMBERED = 32_768
"""More than the conversations that may be moved in as long as an order is not given again."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Pages that a place was told to let go of."""

    kind: PlaceKind
    pages: frozenset[PageKey]


_Times = dict[tuple[object, ...], float]


class Remembered:
    """All that later rounds go by.

    Args:
        policies: Who proposes.
        bytes_per_s: How much may move.
    """

    def __init__(
        self, policies: Sequence[ClusterPolicy], *, bytes_per_s: int = BYTES_PER_S
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.wishes = Wishes(policies)
        self.hints = Hints()
        self.told: _Times = {}
        """Refusals, and when they were told of."""
        self.given: _Times = {}
        """Orders, and when they were given."""
        self.in_vain: _Times = {}
        """Orders that were looked up in vain, and when."""
        self.leaving: dict[tuple[object, ...], Leaving] = {}
        """Orders to let go of pages, and of which."""
        self.part_given: dict[tuple[object, ...], int] = {}
        """Of orders that go in parts: where the part begins that was given last."""
        self.bytes_left = float(bytes_per_s)
        """What may move now."""
        self._filled_s: float | None = None
        self.failures = [0] * len(policies)

    def copy(self) -> Remembered:
        """Return the same, to be changed by itself."""
        other = Remembered((), bytes_per_s=self.bytes_per_s)
        other.wishes = self.wishes.copy()
        other.hints = self.hints.copy()
        other.told, other.in_vain = dict(self.told), dict(self.in_vain)
        other.go_on_from(self)
        other.failures = list(self.failures)
        return other

    def go_on_from(self, before: Remembered) -> None:
        """Learn which orders are on their way, whichever policies proposed them, and how much may move now."""
        self.given, self.leaving = dict(before.given), dict(before.leaving)
        self.part_given = dict(before.part_given)
        self.bytes_left = min(self.bytes_per_s, before.bytes_left)
        self._filled_s = before._filled_s

    def begin(self, now_s: float) -> None:
        """Begin a round: forget what is long ago, and let as much more move as the time since allows."""
        since_s = now_s - (now_s if self._filled_s is None else self._filled_s)
        self._filled_s = now_s
        rate = self.bytes_per_s
        self.bytes_left = min(rate, self.bytes_left + rate * max(0.0, since_s))
        for memory, keep_s in (
            (self.told, QUIET_S),
            (self.in_vain, QUIET_S),
            (self.given, AGAIN_S),
        ):
            for key in [key for key, at_s in memory.items() if now_s - at_s >= keep_s]:
                del memory[key]
            while len(memory) > _MOST_REMEMBERED:
                del memory[next(iter(memory))]
        self.leaving = {key: one for key, one in self.leaving.items() if key in self.given}
        self.part_given = {key: at for key, at in self.part_given.items() if key in self.given}

    def let_go_at(self, kind: PlaceKind, pages: Iterable[PageKey]) -> bool:
        """Say whether places of a kind were told lately to let go of any of these pages."""
        some = [one.pages for one in self.leaving.values() if one.kind is kind]
        return bool(some) and not all(map(frozenset(pages).isdisjoint, some))

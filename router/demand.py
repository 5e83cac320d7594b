"""How often groups of pages are asked for, as one router sees it.

Covers counting with decay, bounded. Pure. Does not cover what is done with it
(`pie.router.conductor`). A prompt is a use of each group that it fills to the end of a page.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from pie.page.key import PageKey

_GROUP_PAGES = 32
"""As the pool shares pages out (`pie.pool.placement`), which a router does not import."""
_MOST_GROUPS = 65_536
_MOST_OF_A_PROMPT = 64
"""Groups of one prompt that are counted: 32,768 tokens at 16 a page."""
_HALF_S = 5.0
"""Uses count half after so long."""
_RATE = math.log(2) / _HALF_S
_KNOWN_USES = 1.5
"""Of a group that is used so much is remembered which prompt holds it."""
_MOST_KNOWN = 256
_MOST_PAGES_KNOWN = 1_024
"""Of one prompt; of all together 256 times as many, some 20 MB."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The latest prompt that holds a group."""

    chain: Sequence[PageKey]
    """Its pages up to the group's last."""
    model_root: bytes
    tenant_tag: str
    session_tag: str


class Demand:
    """Uses of groups, the latest used one last."""

    def __init__(self) -> None:
        self._heat: dict[PageKey, float] = {}
        """The logarithm of uses as they would have counted at the time 0: who is before whom stays so as time goes by."""
        self._holders: OrderedDict[PageKey, Holder] = OrderedDict()

    def used(self, keys: Sequence[PageKey], now_s: float) -> None:
        """Learn of a prompt with these pages."""
        for group in islice(keys[::_GROUP_PAGES], _MOST_OF_A_PROMPT):
            uses = self._uses(group, now_s) + 1.0
            self._heat.pop(group, None)
            self._heat[group] = math.log(uses) + _RATE * now_s
        while len(self._heat) > _MOST_GROUPS:
            del self._heat[next(iter(self._heat))]

    def held_by(
        self,
        keys: Sequence[PageKey],
        now_s: float,
        *,
        model_root: bytes,
        tenant_tag: str,
        session_tag: str,
    ) -> None:
        """Learn whose the prompt with these pages is, of which `used` was told."""
        for at in range(0, min(len(keys), _MOST_PAGES_KNOWN), _GROUP_PAGES):
            group = keys[at]
            if self.uses_per_s(group, now_s) < _KNOWN_USES * _RATE:
                # What comes after it is used no more than it is.
                break
            chain = tuple(keys[: min(at + _GROUP_PAGES, _MOST_PAGES_KNOWN)])
            self._holders[group] = Holder(chain, model_root, tenant_tag, session_tag)
            self._holders.move_to_end(group)
        while len(self._holders) > _MOST_KNOWN:
            self._holders.popitem(last=False)

    def holder(self, group: PageKey) -> Holder | None:
        """Return the latest prompt that holds a group, where that is remembered."""
        return self._holders.get(group)

    def uses_per_s(self, group: PageKey, now_s: float) -> float:
        """Return how often a group is used."""
        return self._uses(group, now_s) * _RATE

    def hottest(self, most: int) -> list[PageKey]:
        """Return the groups that are used most."""
        return heapq.nlargest(most, self._heat, key=self._heat.__getitem__)

    def _uses(self, group: PageKey, now_s: float) -> float:
        """Return uses, faded."""
        heat = self._heat.get(group)
        return 0.0 if heat is None else math.exp(heat - _RATE * now_s)

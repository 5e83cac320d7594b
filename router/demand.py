"""How often groups of pages are asked for, as one router sees it.

Covers counting with decay, bounded. Pure. Does not cover what is done with it
(`pie.router.conductor`). A prompt is a use of each group that it fills to the end of a page.

Which groups are hottest is known without a look at all of them. Time changes no order, and a group grows hotter by its
uses alone: so only those that were hottest before, none of which is forgotten, and those used since can be now.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from pie.page.groups import GROUP_PAGES
from pie.page.key import PageKey

_MOST_GROUPS = 65_536
_MOST_HOTTEST = 256
_MOST_SINCE = 2_048
"""Groups used since the hottest were told apart last: doing so among them takes a millisecond."""
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
    root: bytes = b""
    """What the first page's key is made of: the tenant's root; empty where it is not known."""


class Demand:
    """Uses of groups.

    Args:
        most_groups: Groups that are remembered, the latest used ones and the hottest; `_MOST_GROUPS` where None.
        most_hottest: Groups that are told as the hottest, fewer than are remembered.
        most_since: Groups used one after another that are kept apart.
    """

    def __init__(
        self,
        *,
        most_groups: int | None = None,
        most_hottest: int = _MOST_HOTTEST,
        most_since: int = _MOST_SINCE,
    ) -> None:
        self._most_groups = _MOST_GROUPS if most_groups is None else most_groups
        self._most_hottest = most_hottest
        self._most_since = most_since
        self._heat: OrderedDict[PageKey, float] = OrderedDict()
        """The logarithm of uses as they would have counted at the time 0: who is before whom stays so as time goes by."""
        self._hottest: dict[PageKey, None] = {}
        """The hottest ones when that was last looked at, in order."""
        self._since: dict[PageKey, None] = {}
        """Those used since, the latest used one last."""
        self._holders: OrderedDict[PageKey, Holder] = OrderedDict()

    def used(self, keys: Sequence[PageKey], now_s: float) -> None:
        """Learn of a prompt with these pages."""
        for group in islice(keys[::GROUP_PAGES], _MOST_OF_A_PROMPT):
            uses = self._uses(group, now_s) + 1.0
            self._heat[group] = math.log(uses) + _RATE * now_s
            self._heat.move_to_end(group)
            self._since.pop(group, None)
            self._since[group] = None
        while len(self._heat) > self._most_groups:
            self._forget()
        if len(self._since) >= self._most_since:
            self._tell_apart()

    def held_by(
        self,
        keys: Sequence[PageKey],
        now_s: float,
        *,
        model_root: bytes,
        tenant_tag: str,
        session_tag: str,
        root: bytes = b"",
    ) -> None:
        """Learn whose the prompt with these pages is, of which `used` was told; `root` is what its first key is made of."""
        for at in range(0, min(len(keys), _MOST_PAGES_KNOWN), GROUP_PAGES):
            group = keys[at]
            if self.uses_per_s(group, now_s) < _KNOWN_USES * _RATE:
                # What comes after it is used no more than it is.
                break
            chain = tuple(keys[: min(at + GROUP_PAGES, _MOST_PAGES_KNOWN)])
            self._holders[group] = Holder(chain, model_root, tenant_tag, session_tag, root)
            self._holders.move_to_end(group)
        while len(self._holders) > _MOST_KNOWN:
            self._holders.popitem(last=False)

    def holder(self, group: PageKey) -> Holder | None:
        """Return the latest prompt that holds a group, where that is remembered."""
        return self._holders.get(group)

    def uses_per_s(self, group: PageKey, now_s: float) -> float:
        """Return how often a group is used."""
        return self._uses(group, now_s) * _RATE

    def hottest(self) -> list[PageKey]:
        """Return the groups that are used most, `most_hottest` of them, in order."""
        self._tell_apart()
        return list(self._hottest)

    def _tell_apart(self) -> None:
        if not self._since:
            return
        before = (group for group in self._hottest if group not in self._since)
        hottest = heapq.nlargest(
            self._most_hottest, [*before, *self._since], key=self._heat.__getitem__
        )
        self._hottest, self._since = dict.fromkeys(hottest), {}

    def _forget(self) -> None:
        """Forget the group that was used longest ago; the hottest ones get another turn."""
        while (group := next(iter(self._heat))) in self._hottest:
            self._heat.move_to_end(group)
        del self._heat[group]
        self._since.pop(group, None)

    def _uses(self, group: PageKey, now_s: float) -> float:
        """Return uses, faded."""
        heat = self._heat.get(group)
        return 0.0 if heat is None else math.exp(heat - _RATE * now_s)

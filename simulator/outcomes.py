"""What became of all requests of a simulation, a row each.

Covers keeping a million of them in some 70 MB. Does not cover what a report makes of them (`pie.simulator.report`).
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import overload

from pie.page.events import PlaceId
from pie.simulator.outcome import Outcome

_TIERS = ("device", "host", "disk", "pool")


class Outcomes(Sequence[Outcome]):
    """Outcomes in the order of arrival: those of requests that are over, and of those under way."""

    def __init__(self) -> None:
        self._under_way: dict[int, Outcome] = {}
        self._places: dict[PlaceId, int] = {}
        self._names: list[PlaceId] = []
        self._place, self._refused = array("H"), array("B")
        self._arrived_s, self._first_s, self._ended_s = array("d"), array("d"), array("d")
        self._prompt, self._predicted, self._output = array("I"), array("I"), array("I")
        self._cached = {tier: array("I") for tier in _TIERS}

    def began(self, outcome: Outcome) -> None:
        """Take in the next request."""
        assert outcome.number == len(self) + 1
        self._under_way[outcome.number] = outcome
        if outcome.place not in self._places:
            self._places[outcome.place] = len(self._names)
            self._names.append(outcome.place)
        self._place.append(self._places[outcome.place])
        self._arrived_s.append(outcome.arrived_s)
        self._prompt.append(outcome.prompt_tokens)
        self._predicted.append(outcome.predicted_tokens)
        self._refused.append(0)
        for times_s in (self._first_s, self._ended_s):
            times_s.append(math.nan)
        for tokens in (self._output, *self._cached.values()):
            tokens.append(0)

    def over(self, outcome: Outcome) -> None:
        """Keep what has become of a request; nothing of it changes any more."""
        at = outcome.number - 1
        del self._under_way[outcome.number]
        if outcome.first_token_s is not None:
            self._first_s[at] = outcome.first_token_s
        if outcome.ended_s is not None:
            self._ended_s[at] = outcome.ended_s
        self._output[at] = outcome.output_tokens
        self._refused[at] = outcome.refused
        for tier, tokens in outcome.cached.items():
            self._cached[tier][at] = tokens

    def __len__(self) -> int:
        return len(self._arrived_s)

    @overload
    def __getitem__(self, at: int) -> Outcome: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Outcome]: ...
    def __getitem__(self, at: int | slice) -> Outcome | Sequence[Outcome]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        known = self._under_way.get(at + 1)
        if known is not None:
            return known
        return Outcome(
            number=at + 1,
            place=self._names[self._place[at]],
            arrived_s=self._arrived_s[at],
            prompt_tokens=self._prompt[at],
            predicted_tokens=self._predicted[at],
            first_token_s=_known(self._first_s[at]),
            ended_s=_known(self._ended_s[at]),
            cached={tier: tokens[at] for tier, tokens in self._cached.items() if tokens[at]},
            output_tokens=self._output[at],
            refused=bool(self._refused[at]),
        )


def _known(time_s: float) -> float | None:
    return None if math.isnan(time_s) else time_s

"""Whether what a routing policy returned is a choice.

Covers reading it without running any of the policy's code, so that it can neither raise nor hang later.
Does not cover what is done instead of one that is refused (`pie.router.choice`).
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import cast

from pie.page.events import PlaceId
from pie.policies.errors import BadChoiceError
from pie.policies.routing import Choice, Cost
from pie.policies.telling import name_of

_MOST_SHOWN = 100
"""Characters of a name that a refusal repeats: a policy may return megabytes."""
_FLOAT_BITS = 1_023
"""Whole numbers of fewer bits are finite as floats."""


def checked(choice: object, candidates: Container[PlaceId], most_costs: int) -> Choice:
    """Return a choice with fields of Python's own types.

    Args:
        choice: What the policy returned.
        candidates: Places that it was shown.
        most_costs: How many those are.

    Raises:
        BadChoiceError: It is no `Choice` of a candidate, or a cost is not one of a candidate in finite numbers.
    """
    # Of exactly this type: what inherits from it may have code in its fields.
    if type(choice) is not Choice:
        raise BadChoiceError(f"it returned {name_of(type(choice))} in place of a Choice")
    place = _candidate(choice.place, candidates, "chose")
    costs: object = choice.costs
    if type(costs) is not tuple and type(costs) is not list:
        raise BadChoiceError(f"its costs are {name_of(type(costs))} in place of a tuple")
    if len(costs) > most_costs:
        raise BadChoiceError(f"it told {len(costs)} costs of {most_costs} candidates")
    return Choice(place, tuple(_cost(one, candidates) for one in costs))


def _cost(cost: object, candidates: Container[PlaceId]) -> Cost:
    if type(cost) is not Cost:
        raise BadChoiceError(f"one of its costs is {name_of(type(cost))}")
    return Cost(
        _candidate(cost.place, candidates, "told a cost of"),
        _finite(cost.total_ms),
        _finite(cost.wait_ms),
        _finite(cost.load_ms),
        _finite(cost.prefill_ms),
        _finite(cost.decode_share_ms),
    )


def _candidate(place: object, candidates: Container[PlaceId], did: str) -> PlaceId:
    if not issubclass(type(place), str):
        raise BadChoiceError(f"it {did} a place that is {name_of(type(place))}, not str")
    name = PlaceId(str.__str__(place))
    if name not in candidates:
        raise BadChoiceError(f"it {did} {_short(name)!r}, which is no candidate")
    return name


def _finite(value: object) -> float:
    # As the base type reads it: a type that inherits from it may have code of its own.
    if issubclass(type(value), float):
        number = float.__float__(cast(float, value))
    elif issubclass(type(value), int):
        whole = int.__int__(cast(int, value))
        number = float(whole) if whole.bit_length() < _FLOAT_BITS else math.inf
    else:
        raise BadChoiceError(f"a cost is {name_of(type(value))}, not a number")
    if not math.isfinite(number):
        raise BadChoiceError("a cost is no finite number")
    return number


def _short(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"

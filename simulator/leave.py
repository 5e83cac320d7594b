"""Places that are told to leave in a simulation: which, and when.

Covers the record, reading it from a command line, and what makes no sense. Does not cover leaving
(`pie.simulator.worker`, `.pool`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pie.page.events import PlaceId
from pie.simulator.errors import SetupError
from pie.simulator.trace import MOST_S


@dataclass(frozen=True, slots=True)
class Leave:
    """A place that leaves."""

    place: PlaceId
    at_s: float


def read_leave(text: str) -> Leave:
    """Return what `worker-1@30` stands for: that place leaves after 30 seconds.

    Raises:
        SetupError: It stands for nothing.
    """
    place, _, at = text.partition("@")
    try:
        at_s = float(at)
    except ValueError:
        at_s = math.nan
    if not (place and 0 <= at_s <= MOST_S):
        raise SetupError(
            "who leaves is told as PLACE@SECONDS, such as worker-1@30, with seconds from 0 to "
            f"{MOST_S:,.0f}, not {text!r}"
        )
    return Leave(PlaceId(place), at_s)


def check_leaves(
    leaves: Sequence[Leave], workers: Sequence[PlaceId], nodes: Sequence[PlaceId]
) -> None:
    """Raise `SetupError` where a place is none, leaves twice, or all workers leave."""
    places = [leave.place for leave in leaves]
    for place in places:
        if place not in workers and place not in nodes:
            known = f"{workers[0]} to {workers[-1]}"
            known += f" and {nodes[0]} to {nodes[-1]}" if nodes else ""
            raise SetupError(f"{place} cannot leave: there are {known}")
        if places.count(place) > 1:
            raise SetupError(f"{place} cannot leave twice")
    if set(workers) <= set(places):
        raise SetupError("all workers leave: one must stay")

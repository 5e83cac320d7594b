"""The numbers in a place's status, flat, as they travel.

Covers marking a field as a counter or a gauge and making a `StatusReport` of a status. Does not
cover what is counted (`pie.worker.status`, `pie.pool.status`) or where it is shown (`pie.router`).
"""

from __future__ import annotations

import enum
import functools
from typing import Annotated, TypeVar, get_type_hints

import msgspec

from pie.page.events import Epoch, PlaceId
from pie.wire.messages import StatusReport


class Kind(enum.Enum):
    """How a number moves."""

    COUNTER = "counter"
    """Only up, from 0 at the place's start."""
    GAUGE = "gauge"
    """Up and down."""


_T = TypeVar("_T", int, float, dict[str, int])

Counter = Annotated[_T, Kind.COUNTER]
"""Type of a status' field that only grows: `Counter[int]`, or `Counter[dict[str, int]]` by name."""
Gauge = Annotated[_T, Kind.GAUGE]
"""Type of a status' field that goes up and down: `Gauge[int]`, `Gauge[float]` or by name."""


def report(
    request_id: str, place: PlaceId, epoch: Epoch, state: str, status: msgspec.Struct
) -> StatusReport:
    """Return the answer to an `AskStatus`: the fields of `status` that are marked, flat.

    A field of several numbers, by name, becomes one number for each, `field.name`.
    """
    flat: dict[Kind, dict[str, int | float]] = {kind: {} for kind in Kind}
    for name, kind in kinds(type(status)).items():
        value = getattr(status, name)
        if isinstance(value, dict):
            flat[kind].update({f"{name}.{part}": number for part, number in value.items()})
        else:
            flat[kind][name] = value
    return StatusReport(request_id, place, epoch, state, flat[Kind.COUNTER], flat[Kind.GAUGE])


@functools.cache
def kinds(status: type[msgspec.Struct]) -> dict[str, Kind]:
    """Return the marked fields of a status' type, and how each moves."""
    hints = get_type_hints(status, include_extras=True)
    return {
        name: mark
        for name, hint in hints.items()
        for mark in getattr(hint, "__metadata__", ())
        if isinstance(mark, Kind)
    }

"""What a routing policy needs to see of many workers that hold alike: those of them that it may choose.

Covers what a policy is shown of such workers, and lots among equals. Does not cover which workers hold alike
(`pie.router.shortlist`). Why, and what was measured: `docs/design/0025-shortlists.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from pie.policies.routing import RequestView, lots

Column: TypeAlias = npt.NDArray[np.float64]
"""One number for each of the workers."""
Positions: TypeAlias = npt.NDArray[np.int64]
"""Some of them."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Workers that differ in nothing but their load: they hold alike, are as fast, and none has the conversation."""

    names: Sequence[bytes]
    """Of all workers, as `pie.policies.routing.encoded` has them."""
    rows: Positions
    """Which of those they are."""
    prefill_tokens_per_s: float
    """Of each of them."""
    wait_ms: Column
    """`WorkerView.wait_ms`, to the last digit."""
    in_flight: Column
    running: Column
    decode_step_ms: Column

    def first_of_equals(self, request: RequestView, likely: Positions, *loads: Column) -> Positions:
        """Return `likely` without those that lose the draw to another whose load is the same.

        `loads` are all that a policy goes by, beside `in_flight` and `wait_ms`.
        """
        if len(likely) < 2:
            return likely
        columns = [column[likely] for column in (self.wait_ms, self.in_flight, *loads)]
        if all((column == column[0]).all() for column in columns):
            return likely[[self._first(request, likely)]]
        equals: dict[tuple[float, ...], list[int]] = {}
        for at, load in zip(likely.tolist(), zip(*columns, strict=True), strict=True):
            equals.setdefault(load, []).append(at)
        firsts = [some[self._first(request, some)] for some in equals.values()]
        return np.array(sorted(firsts), np.int64)

    def _first(self, request: RequestView, some: Sequence[int] | Positions) -> int:
        """Return which one of some comes first, as `pie.policies.routing.by_load` has it."""
        names = [self.names[row] for row in self.rows[some].tolist()]
        drawn = lots(request.request_id, names)
        first = min(drawn)
        return min((at for at, one in enumerate(drawn) if one == first), key=names.__getitem__)


@runtime_checkable
class Shortlisting(Protocol):
    """A routing policy that says which of many workers it may choose."""

    def likely(self, request: RequestView, workers: Alike) -> Positions:
        """Return those of `workers` among which the policy would choose, were there no others.

        What it chooses from them, and from those of any other kind, must be what it chooses from all.
        """
        ...

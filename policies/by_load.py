"""`by-load`: how many workers a model wants, by what waits and runs there.

Covers one built-in cluster policy. It is a hint: nobody is started or stopped by it. The rule is that of
Kubernetes' HorizontalPodAutoscaler: workers × the worst ratio of what is there to what a worker is meant to bear,
rounded up, and no change within a tolerance. A change counts once it has been wanted throughout `rise_after` or
`fall_after`: up to the least, down to the most that was wanted meanwhile, so that a burst or a pause changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from pie.page.events import PlaceKind
from pie.policies.cluster_policy import ClusterView, Order, PlaceView, WantWorkers
from pie.policies.order_checks import MOST_WORKERS
from pie.policies.units import Positive, Seconds, Share

_AT_FIRST = "up at first"
_BEFORE = "so many were wanted before"


class ByLoad:
    """As many workers as what waits and runs asks for.

    Args:
        min: Fewest workers of a model.
        max: Most.
        waiting: Requests that may wait at a worker, on average.
        wait: How long what waits at a worker may take to compute, on average.
        busy: How much of its device memory a worker's running requests may use, on average.
        running: Sequences in decode that a worker bears; unset does not count them.
        tolerance: How far from what it is meant to be a load may be without a change.
        rise_after: How long more must have been wanted.
        fall_after: How long fewer must have been.
    """

    def __init__(
        self,
        min: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1,  # noqa: A002 - as operators know it
        max: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 8,  # noqa: A002
        waiting: Positive = 2.0,
        wait: Seconds = 2.0,
        busy: Share = 0.8,
        running: Positive | None = None,
        tolerance: Share = 0.1,
        rise_after: Seconds = 5.0,
        fall_after: Seconds = 300.0,
    ) -> None:
        if min > max:
            raise ValueError(f"`min` is {min}, more than `max`, which is {max}")
        self._min = min
        self._max = max
        self._waiting = waiting
        self._wait_s = wait
        self._busy = busy
        self._running = running
        self._tolerance = tolerance
        self._rise_after_s = rise_after
        self._fall_after_s = fall_after
        self._tracks: dict[str, _Track] = {}

    def decide(self, view: ClusterView) -> Iterable[Order]:
        """Return how many workers each model wants."""
        models: dict[str, list[PlaceView]] = {model: [] for model in self._tracks}
        for one in view.places:
            if one.kind is PlaceKind.WORKER and one.model:
                models.setdefault(one.model, []).append(one)
        for model, there in sorted(models.items()):
            workers = [one for one in there if not one.draining]
            track = self._tracks.get(model)
            if track is None:
                before = view.wanted.get(model)
                if before is None and not workers:
                    continue
                count = len(workers) if before is None else before.workers
                reason = self._first(count) if before is None else _inherited(before.reason)
                track = self._tracks[model] = _Track(self._bounded(count), reason, view.now_s)
            if track.reason.endswith(_AT_FIRST) and self._bounded(len(workers)) > track.workers:
                # Of a cluster that starts, not all are up at first, and the load has asked for no fewer yet.
                track.workers, track.since_s = self._bounded(len(workers)), None
                track.reason = self._first(len(workers))
            if workers:
                track.seen_s = view.now_s
                count, reason = self.wanted(workers)
                track.learn(count, reason, view.now_s, self._rise_after_s, self._fall_after_s)
            elif view.now_s - track.seen_s >= self._fall_after_s:
                del self._tracks[model]
                continue
            yield WantWorkers(model, track.workers, track.reason if workers else _kept(len(there)))

    def wanted(self, workers: Sequence[PlaceView]) -> tuple[int, str]:
        """Return how many workers the load of now asks for, and why."""
        count = len(workers)
        waiting = sum(one.waiting for one in workers) / count
        wait_s = sum(one.wait_s for one in workers) / count
        busy = sum(one.used_share for one in workers) / count
        running = sum(one.running for one in workers) / count
        loads = [
            (waiting / self._waiting, f"{waiting:.1f} requests wait", _meant(self._waiting)),
            (
                wait_s / self._wait_s,
                f"{wait_s:.1f} s of computing wait",
                f"{self._wait_s:g} s are meant to",
            ),
            (
                busy / self._busy,
                f"{busy:.0%} of memory is in use",
                f"{self._busy:.0%} is meant to be",
            ),
        ]
        if self._running is not None:
            told = f"{running:.1f} sequences run"
            loads.append((running / self._running, told, _meant(self._running)))
        ratio, told, meant = max(loads)
        steady = abs(ratio - 1.0) <= self._tolerance
        wanted = count if steady else math.ceil(min(count * ratio, MOST_WORKERS))
        bounded = self._bounded(wanted)
        where = "the one worker" if count == 1 else f"each of {count} workers"
        reason = f"{told} at {where}, where {meant}"
        if bounded != wanted:
            named = "max" if bounded < wanted else "min"
            reason += f"; `{named}` is {bounded}"
        return bounded, reason

    def _first(self, count: int) -> str:
        """Return why a number is wanted before the load of a model with so many workers has asked for another."""
        bounded = self._bounded(count)
        if bounded == count:
            return f"so many were {_AT_FIRST}"
        named = "max" if bounded < count else "min"
        return (
            f"`{named}` is {bounded}, where {count} {'was' if count == 1 else 'were'} {_AT_FIRST}"
        )

    def _bounded(self, workers: int) -> int:
        return min(max(workers, self._min), self._max)


def _meant(number: float) -> str:
    return f"{number:g} {'is' if number == 1 else 'are'} meant to"


def _kept(leaving: int) -> str:
    """Return why a number stays that no worker's load can change; of the model so many are leaving."""
    why = (
        f"all of its workers leave, {leaving} in number"
        if leaving
        else "none of its workers is there"
    )
    return f"{why}; {_BEFORE}"


def _inherited(reason: str) -> str:
    """Return the reason of another router's number, without what was so at that moment alone."""
    return _BEFORE if reason.endswith(_BEFORE) else reason


@dataclass(slots=True)
class _Track:
    """What is said of one model."""

    workers: int
    reason: str
    """Why it is that number."""
    seen_s: float
    """When one of its workers was there last."""
    rises: bool = False
    """Whether another number that is wanted for a while now is a larger one."""
    since_s: float | None = None
    """Since when another number is wanted."""
    nearest: int = 0
    """Of those that were wanted since then the nearest one to what is said."""
    nearest_reason: str = ""

    def learn(
        self, wanted: int, reason: str, now_s: float, rise_after_s: float, fall_after_s: float
    ) -> None:
        """Learn what the load of now asks for."""
        if wanted == self.workers:
            self.since_s = None
            return
        rises = wanted > self.workers
        if self.since_s is None or rises != self.rises:
            self.since_s, self.rises = now_s, rises
            self.nearest, self.nearest_reason = wanted, reason
        elif abs(wanted - self.workers) <= abs(self.nearest - self.workers):
            self.nearest, self.nearest_reason = wanted, reason
        if now_s - self.since_s >= (rise_after_s if rises else fall_after_s):
            self.workers, self.reason = self.nearest, self.nearest_reason
            self.since_s = None

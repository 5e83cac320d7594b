"""A scale policy: so many workers more than those that have something to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.policies.cluster_policy import ClusterView, WantWorkers


class SpareWorkers:
    """Workers without a request stand by, so that the next burst finds them there.

    Args:
        spare: How many.
    """

    def __init__(self, spare: Annotated[int, Field(ge=0, le=1_000)] = 1) -> None:
        self._spare = spare

    def decide(self, view: ClusterView) -> Iterable[WantWorkers]:
        """Say it of each model in every round: a hint that is not repeated is dropped."""
        busy = Counter(one.model for one in view.workers() if one.busy)
        for model in sorted({one.model for one in view.workers()}):
            count = busy[model] + self._spare
            yield WantWorkers(model, count, f"{busy[model]} are busy")

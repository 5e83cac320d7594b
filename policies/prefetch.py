"""`prefetch`: what a waiting request will need is brought near while it waits.

Covers one built-in cluster policy. Workers look ahead in their queues by themselves, without a round over the
network (`pie.worker.prefetch`); the policy says how far.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from pie.policies.cluster_policy import ClusterView, Order

MOST_REQUESTS = 64


class Prefetch:
    """What a waiting request will need is brought into host memory while it waits.

    Args:
        requests: How many requests from the head of each worker's queue on; 0 for none.
    """

    def __init__(self, requests: Annotated[int, Field(ge=0, le=MOST_REQUESTS)] = 4) -> None:
        self.requests = requests

    def decide(self, view: ClusterView) -> Iterable[Order]:  # noqa: ARG002 - workers see to it
        """Return nothing: each worker looks at its own queue."""
        return ()

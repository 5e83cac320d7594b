"""A router that leads and stops itself in a round: `python -m tests.router.freezing_leader INDEX`.

INDEX is the index's settings as JSON. In its first round it orders copies; in its second one it stands still as its policy
is asked, until it is told to go on, and says `follows` in a line once it does not lead.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable, Mapping

from pie.index.mirror import Mirror
from pie.index.settings import IndexSettings
from pie.page.key import PageKey
from pie.policies.cluster_manager import ClusterManager
from pie.policies.cluster_policy import ClusterView, Order, SetCopies, Wanted
from pie.policies.policy_set import PolicySet
from pie.policies.prefixes import NO_PREFIXES, Prefixes
from pie.router import conductor as module
from pie.router.conductor import Conductor
from pie.router.conversations import Conversations
from pie.router.demand import Demand
from pie.router.ordering import Ordering
from pie.router.overview import Overview

GROUP = PageKey(b"1" * 32)


class Freezes:
    """A policy that stops its process the second time that it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, shown: ClusterView) -> Iterable[Order]:
        self.asked += 1
        if self.asked == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        return [SetCopies(GROUP, 3 if self.asked == 1 else 2, "hot")]


class Four(Overview):
    """A cluster of four nodes."""

    async def view(
        self,
        table: Mapping[PageKey, int],
        now_s: float,
        wanted: Mapping[str, Wanted] | None = None,
        prefixes: Prefixes = NO_PREFIXES,
    ) -> ClusterView:
        return ClusterView(4, 1, (), now_s)


async def main(index: IndexSettings) -> None:
    """Lead, stand still and follow."""
    module._LEASE_S, module._ROUND_S, module._EVERY_S = 2.0, 1.0, 0.1
    overview, policy = Four(Mirror(), dict, Demand(), Conversations()), Freezes()
    conductor = Conductor(
        index.url, "frozen", overview, Ordering(dict), PolicySet(), settings=index
    )
    conductor._manager = ClusterManager([("frozen", policy)])
    conductor.start()
    # A round is over before the next one looks who leads.
    while conductor.leads or not policy.asked:  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    sys.stdout.write("follows\n")
    sys.stdout.flush()
    await asyncio.sleep(60)


if __name__ == "__main__":
    asyncio.run(main(IndexSettings.model_validate_json(sys.argv[1])))

"""`cost`: the worker that is likely to give the first token soonest takes the request.

Covers one built-in routing policy. Does not cover where loads and matches come from
(`pie.router.choice`).

Everything is counted in milliseconds: the wait for prompts that came before, the load of pages
that the worker would fetch, the prefill of what it would have to compute, and a share for the
sequences that it decodes meanwhile.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from pie.page.events import PlaceId
from pie.policies.routing import (
    Choice,
    Cost,
    RequestView,
    WorkerView,
    by_load,
    divisible,
)
from pie.policies.shortlist import Alike, Positions
from pie.policies.units import NonNegative

_ROUNDING = 1e-11
"""Sums of a cost's parts differ by less of the cost, in whichever order they were added."""

MISS_WEIGHT = 5.0
"""How much more a missing token counts than its own prefill: its page will displace another,
which somebody will miss. On the Mooncake conversation trace in simulation (open loop) 1 wastes the caches.
4 workers of 15,000 tokens a second: 5 gave a mean time to first token of 1.00 s and a hit rate of .2645, 3
gave 1.02 s and .258; the best rule of any peer 1.40 s. 8 of 8,000, whose caches hold most that comes back: 5
gave 1.29 s and .332, 3 gave 1.26 s and .3245, and no weight a sooner one at .32."""

DECODE_SHARE = 0.02
"""What one sequence in decode adds to the step that makes the first token, as a share of that
step: SmolLM2-135M decodes 19 tok/s alone (53 ms a step) and 230 tok/s at batch 16 (70 ms), 2 % for
each more."""

SESSION_SHARE = 0.02
"""A conversation stays where it was unless another worker costs less by more than this share: rates
are not known better."""


class CostRouting:
    """Least estimated time to first token; a tie goes to the conversation's worker, or the less loaded.

    A prefix that many want spreads by itself: once the queue at its holder takes longer than computing the
    prefix elsewhere, the next request goes elsewhere and leaves a copy there. Its tokens count no more than
    their prefill, because a copy serves the others too.

    Args:
        miss_weight: How much more a missing token counts than its own prefill.
        decode_share: What a sequence in decode adds to a step, as a share of it.
        session_share: How much more, as a share, the worker of a conversation's latest request may cost
            than the best one.
    """

    def __init__(
        self,
        *,
        miss_weight: NonNegative = MISS_WEIGHT,
        decode_share: NonNegative = DECODE_SHARE,
        session_share: NonNegative = SESSION_SHARE,
    ) -> None:
        self._miss_weight = miss_weight
        self._decode_share = decode_share
        self._session_share = session_share

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker for `request`, and every candidate's cost, best first.

        `Cost.prefill_ms` is the prefill itself; `total_ms` counts it `miss_weight` times, and once where
        the prompt is hot.
        """
        ranked = sorted(
            [(self.cost(request, worker), worker) for worker in workers],
            key=lambda pair: pair[0].total_ms,
        )
        least_ms = ranked[0][0].total_ms
        # A lot for each of a thousand workers would take longer than all else.
        ties = bisect.bisect_right(ranked, least_ms, key=lambda pair: pair[0].total_ms)
        best = min(range(ties), key=lambda at: by_load(request, ranked[at][1])) if ties > 1 else 0
        for at, (cost, worker) in enumerate(ranked):
            if cost.total_ms > least_ms * (1 + self._session_share):
                break
            if worker.has_session:
                best = at
                break
        ranked.insert(0, ranked.pop(best))
        return Choice(
            place=PlaceId(ranked[0][1].place),
            costs=tuple(cost for cost, _ in ranked),
        )

    def likely(self, request: RequestView, workers: Alike) -> Positions:
        """Return the workers that cost least, of some that differ in their load alone."""
        share_ms = np.maximum(workers.running, 0) * workers.decode_step_ms * self._decode_share
        load_ms = workers.wait_ms + share_ms
        least_ms = float(load_ms.min())
        most_ms = least_ms + request.prompt_tokens * max(self._miss_weight, 1) * 1000 / divisible(
            workers.prefill_tokens_per_s
        )
        # What is not a number is not said to be more than anything.
        likely = (~(load_ms > least_ms + _ROUNDING * most_ms)).nonzero()[0]
        return workers.first_of_equals(request, likely, share_ms)

    def cost(self, request: RequestView, worker: WorkerView) -> Cost:
        """Return the estimated time to first token at one worker.

        Pages that another worker is computing are waited for and loaded from the pool where that is faster
        than computing them here too. Pages that load slower than they are computed, or at a rate not known yet, count as missing:
        the worker computes them.
        """
        ms_per_token = 1000 / divisible(worker.prefill_tokens_per_s)
        # A fully held prompt computes its last token all the same.
        missing = max(request.prompt_tokens - worker.device_tokens, 1)
        load_ms = 0.0
        for tier, tokens in worker.loads.items():
            loaded = min(max(tokens, 0), missing - 1)
            load_ms_per_token = 1000 / divisible(worker.load_tokens_per_s.get(tier, 0.0))
            if load_ms_per_token < ms_per_token:
                load_ms += loaded * load_ms_per_token
                missing -= loaded
        wait_ms = worker.wait_ms
        awaited = 0
        if worker.coming_tokens:
            awaited = min(worker.awaited_tokens(request.prompt_tokens), missing - 1)
        if awaited > 0:
            wait_ms = max(wait_ms, worker.coming_ms)
            load_ms += awaited * 1000 / divisible(worker.load_tokens_per_s.get("pool", 0.0))
            missing -= awaited
        prefill_ms = missing * ms_per_token
        # A copy of what many want at this moment pays for the page that it displaces.
        held = request.prompt_tokens - missing
        hot = min(missing, max(0, request.hot_tokens - held))
        displaced_ms = (missing - hot) * ms_per_token
        decode_share_ms = max(worker.running, 0) * worker.decode_step_ms * self._decode_share
        return Cost(
            place=worker.place,
            total_ms=wait_ms
            + load_ms
            + prefill_ms
            + (self._miss_weight - 1) * displaced_ms
            + decode_share_ms,
            wait_ms=wait_ms,
            load_ms=load_ms,
            prefill_ms=prefill_ms,
            decode_share_ms=decode_share_ms,
        )

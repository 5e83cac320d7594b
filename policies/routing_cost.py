"""`cost`: the worker that is likely to give the first token soonest takes the request.

Covers one built-in routing policy. Does not cover where loads and matches come from
(`pie.router.choice`).

Everything is counted in milliseconds: the wait for prompts that came before, the load of pages
that the worker would fetch, the prefill of what it would have to compute, and a share for the
sequences that it decodes meanwhile.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from pie.page.events import PlaceId
from pie.policies.routing import Choice, Cost, RequestView, WorkerView

MISS_WEIGHT = 5.0
"""How much more a missing token counts than its own prefill: its page will displace another,
which somebody will miss. On the Mooncake conversation trace in simulation (4 workers, open loop)
1 wastes the caches and 5 gave the best mean time to first token, 1.05 s, against 1.40 s for the
best rule of any peer at the same hit rate."""

DECODE_SHARE = 0.02
"""What one sequence in decode adds to the step that makes the first token, as a share of that
step: SmolLM2-135M decodes 19 tok/s alone (53 ms a step) and 230 tok/s at batch 16 (70 ms), 2 % for
each more."""

_SLOWEST_TOKENS_PER_S = 1.0
"""What a rate counts as that is not known yet or makes no sense."""


class CostRouting:
    """Least estimated time to first token; a tie goes to the less loaded worker.

    Args:
        miss_weight: How much more a missing token counts than its own prefill.
        decode_share: What a sequence in decode adds to a step, as a share of it.
    """

    def __init__(
        self, *, miss_weight: float = MISS_WEIGHT, decode_share: float = DECODE_SHARE
    ) -> None:
        if not (math.isfinite(miss_weight) and miss_weight >= 0):
            raise ValueError("miss_weight must be a number of at least 0")
        if not (math.isfinite(decode_share) and decode_share >= 0):
            raise ValueError("decode_share must be a number of at least 0")
        self._miss_weight = miss_weight
        self._decode_share = decode_share

    def choose(self, request: RequestView, workers: Sequence[WorkerView]) -> Choice:
        """Return the worker for `request`, and every candidate's cost, best first.

        `Cost.prefill_ms` is the prefill itself; `total_ms` counts it `miss_weight` times.
        """
        ranked = sorted(
            ((self.cost(request, worker), worker) for worker in workers),
            key=lambda pair: (
                pair[0].total_ms,
                pair[1].queued_tokens,
                pair[1].running,
                # Equals share requests evenly, and any router decides alike.
                _lot(request.request_id, pair[1].place),
                pair[1].place,
            ),
        )
        return Choice(
            place=PlaceId(ranked[0][1].place),
            costs=tuple(cost for cost, _ in ranked),
        )

    def cost(self, request: RequestView, worker: WorkerView) -> Cost:
        """Return the estimated time to first token at one worker.

        Pages that load slower than they are computed, or at a rate not known yet, count as missing:
        the worker computes them.
        """
        ms_per_token = 1000 / _rate(worker.prefill_tokens_per_s)
        # A fully held prompt computes its last token all the same.
        missing = max(request.prompt_tokens - worker.device_tokens, 1)
        load_ms = 0.0
        for tier, tokens in worker.loads.items():
            loaded = min(max(tokens, 0), missing - 1)
            load_ms_per_token = 1000 / _rate(worker.load_tokens_per_s.get(tier, 0.0))
            if load_ms_per_token < ms_per_token:
                load_ms += loaded * load_ms_per_token
                missing -= loaded
        wait_ms = max(worker.queued_tokens, 0) * ms_per_token
        prefill_ms = missing * ms_per_token
        decode_share_ms = max(worker.running, 0) * worker.decode_step_ms * self._decode_share
        return Cost(
            place=worker.place,
            total_ms=wait_ms + load_ms + self._miss_weight * prefill_ms + decode_share_ms,
            wait_ms=wait_ms,
            load_ms=load_ms,
            prefill_ms=prefill_ms,
            decode_share_ms=decode_share_ms,
        )


def _rate(tokens_per_s: float) -> float:
    """Return a rate that can be divided by."""
    if not tokens_per_s >= _SLOWEST_TOKENS_PER_S:  # also a NaN
        return _SLOWEST_TOKENS_PER_S
    return tokens_per_s


def _lot(request_id: str, place: PlaceId) -> bytes:
    """Return a place's lot in the draw among equals."""
    text = f"{request_id}/{place}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=8).digest()

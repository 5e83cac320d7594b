"""What a simulated request's answer goes to.

Covers writing down what becomes of it. Does not cover what is written (`pie.simulator.outcome`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pie.simulator.clock import Clock
from pie.simulator.outcome import Outcome
from pie.wire.messages import Refused, TokenDelta


@dataclass(slots=True)
class Sink:
    """Writes down what becomes of a request."""

    outcome: Outcome
    clock: Clock
    ended: Callable[[], None]
    """Told when the request is over."""

    def on_delta(self, delta: TokenDelta) -> None:
        """Take new tokens."""
        now_s = self.clock.now_s()
        if delta.started is not None:
            cached = delta.started.cached
            self.outcome.first_token_s = now_s
            self.outcome.cached = {
                tier: tokens
                for tier, tokens in (
                    ("device", cached.device),
                    ("host", cached.host),
                    ("disk", cached.disk),
                    ("pool", cached.pool),
                )
                if tokens
            }
        self.outcome.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.outcome.ended_s = now_s
            self.ended()

    def on_refused(self, refused: Refused) -> None:
        """Learn that the worker's queue is full."""
        del refused
        self.outcome.refused = True
        self.ended()

    def on_gone(self) -> None:
        """Workers stay."""

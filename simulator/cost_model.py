"""How long a worker takes: steps and loads.

Covers the numbers and what follows from them. Does not cover measuring them
(`pie.simulator.calibration`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from pie.simulator.errors import SetupError
from pie.worker.load_choice import LoadTier

LOAD_TOKENS_PER_S: Mapping[LoadTier, float] = MappingProxyType(
    {LoadTier.HOST: 300_000.0, LoadTier.DISK: 50_000.0, LoadTier.POOL: 100_000.0}
)

_SLOWEST_PER_S, _FASTEST_PER_S = 1.0, 1e12
_MOST_MS = 60_000
"""A step or a load that takes longer is a mistake, and would be years of simulated seconds."""
_MOST_PAGE_BYTES = 1 << 40


class CostModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker's speed.

    A step takes as long as its weights and its prefill, whichever is longer: decode reads all weights
    for a token of each sequence, prefill computes beside that. What one more sequence in decode adds
    comes on top.
    """

    prefill_tokens_per_s: float = 15_000.0
    decode_step_ms: float = 20.0
    """A step that decodes one sequence."""
    decode_sequence_ms: float = 0.1
    """What each further sequence in decode adds."""
    load_tokens_per_s: dict[LoadTier, float] = msgspec.field(
        default_factory=lambda: dict(LOAD_TOKENS_PER_S)
    )
    """By the tier that pages come from."""
    load_ms: float = 2.0
    """What a load takes beside that."""
    node_tokens_per_s: float = 100_000.0
    """What a pool node gives out to all workers and other nodes together."""
    page_bytes: int = 0
    """Size of a page, for bytes moved; 0 counts 128 KiB a token, as of an 8B model in bfloat16."""

    def check(self) -> None:
        """Raise `SetupError` where a number makes no sense."""
        positive = {
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "node_tokens_per_s": self.node_tokens_per_s,
        }
        positive |= {f"load_tokens_per_s.{k}": v for k, v in self.load_tokens_per_s.items()}
        for name, value in positive.items():
            if not _SLOWEST_PER_S <= value <= _FASTEST_PER_S:
                raise SetupError(
                    f"{name} must be from {_SLOWEST_PER_S:g} to {_FASTEST_PER_S:,.0f}, not {value}"
                )
        for name, value, most in (
            ("decode_step_ms", self.decode_step_ms, _MOST_MS),
            ("decode_sequence_ms", self.decode_sequence_ms, _MOST_MS),
            ("load_ms", self.load_ms, _MOST_MS),
            ("page_bytes", self.page_bytes, _MOST_PAGE_BYTES),
        ):
            if not 0 <= value <= most:
                raise SetupError(f"{name} must be from 0 to {most:,}, not {value}")
        if not self.decode_step_ms + self.decode_sequence_ms:
            raise SetupError("decode_step_ms must be above 0 where decode_sequence_ms is 0")

    def step_s(self, prefill_tokens: int, sequences: int) -> float:
        """Return how long a step takes.

        Args:
            prefill_tokens: Prompt tokens in it.
            sequences: Sequences that decode in it.
        """
        weights_s = self.decode_step_ms / 1e3 if sequences else 0.0
        prefill_s = prefill_tokens / self.prefill_tokens_per_s
        return max(weights_s, prefill_s) + max(0, sequences - 1) * self.decode_sequence_ms / 1e3

    def load_s(self, tier: LoadTier, tokens: int) -> float:
        """Return how long a load of so many tokens' pages takes once its turn has come."""
        rate = self.load_tokens_per_s.get(tier, LOAD_TOKENS_PER_S[tier])
        return self.load_ms / 1e3 + tokens / rate

    def bytes_of(self, page_tokens: int) -> int:
        """Return the size of a page."""
        return self.page_bytes or page_tokens * 131_072

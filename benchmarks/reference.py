"""transformers as it comes: the baseline of the engine's figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache


class Reference:
    """A model with SDPA attention and the dynamic cache.

    Args:
        folder: The model.
        dtype: Of its weights.
        threads: Of torch, in this process.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, threads: int) -> None:
        torch.set_num_threads(threads)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa"
        )

    @torch.inference_mode()
    def prefill_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds of a cold prefill, its first token included."""
        ids = torch.tensor([list(tokens)])
        start_s = time.perf_counter()
        output = self.model(ids, past_key_values=DynamicCache(), logits_to_keep=1)
        int(output.logits[0, -1].argmax())
        return time.perf_counter() - start_s

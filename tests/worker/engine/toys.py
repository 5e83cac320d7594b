"""A model for tests whose next token depends on every slot that it reads, and nothing else.

A page that holds anything but its tokens changes the output, as with a real model, but thousands of
steps a second run.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout
from pie.worker.batch import Batch, LogitRows, Pass, StepOutput

VOCAB = 200


def toy_layout(page_tokens: int) -> PageLayout:
    """Return a layout whose pages hold one 64-bit number a token."""
    spec = LayerSpec(Part.FULL, kv_heads=1, key_dim=1, value_dim=1)
    return PageLayout((spec,), page_tokens, "float32")


def toy_logits(tokens: Sequence[int]) -> torch.Tensor:
    """Return the logits after `tokens`, float32 `[VOCAB]`."""
    seed = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 4, VOCAB).astype(np.float32))


def toy_answer(tokens: Sequence[int], count: int) -> list[int]:
    """Return what greedy generation gives, end tokens ignored."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(toy_logits(known).argmax()))
    return known[len(tokens) :]


class ToyRunner:
    """Runs the toy model over a memory of pages; also the memory that pages are copied from."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.memory = np.full((pages, page_tokens), -1, np.int64)
        self.page_tokens = page_tokens
        self.batches: list[Batch] = []
        self.poison: set[int] = set()
        """Tokens that make the model's output not a number."""
        self.error: Exception | None = None

    def run(self, batch: Batch) -> StepOutput:
        self.batches.append(batch)
        if self.error is not None:
            raise self.error
        written: set[int] = set()
        for one in batch.passes:
            if one.write:
                for slot in range(one.start, one.end):
                    page = one.page_ids[slot // self.page_tokens]
                    self.memory[page, slot % self.page_tokens] = one.token_ids[slot - one.start]
                pages = set(one.page_ids[one.start // self.page_tokens :])
                assert not pages & written, "two passes write a page"
                written |= pages
        logits = torch.stack([self._logits(one) for one in batch.passes])
        rows = [range(i, i + 1) for i in range(len(batch.passes))]
        return StepOutput(logits, rows, [None] * len(rows))

    def copy(self, source_id: int, target_id: int) -> None:
        self.memory[target_id] = self.memory[source_id]

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        raise AssertionError(f"slot {source_slot} was copied to {target_slot}")

    def export(self, page_id: int, part: Part) -> memoryview:
        assert part is Part.FULL
        return memoryview(self.memory[page_id].tobytes())

    def load(self, page_id: int, part: Part, payload: memoryview) -> None:
        assert part is Part.FULL
        self.memory[page_id] = np.frombuffer(payload, np.int64)

    def _logits(self, one: Pass) -> torch.Tensor:
        assert one.logits is LogitRows.LAST
        slots = range(one.end)
        read = [
            int(self.memory[one.page_ids[s // self.page_tokens], s % self.page_tokens])
            for s in slots
        ]
        logits = toy_logits(read)
        return logits * torch.nan if self.poison & set(read) else logits

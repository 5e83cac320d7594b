"""Whether two ways of running a model give the same (DESIGN §10.1)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from pie.page.events import Part
from pie.worker.arena import Arena
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.model import Model
from pie.worker.runner import Runner

LOGIT_TOLERANCE = 1e-5
NEAR_TIE = 1e-3


def assert_same_logits(
    got: torch.Tensor, want: torch.Tensor, tolerance: float = LOGIT_TOLERANCE
) -> None:
    """Float32: every logit within 1e-5 of the largest, or as close as the model itself is."""
    assert got.shape == want.shape
    error = float((got - want).abs().max() / want.abs().max())
    assert error <= tolerance, f"logits are off by {error:.1e} of the largest"


def assert_same_tokens(got: Sequence[int], logits: torch.Tensor) -> None:
    """Greedy tokens are the reference's, unless its top two are closer than 1e-3.

    Args:
        got: Tokens chosen.
        logits: The reference's at those positions, along `got` itself: `[len(got), vocab_size]`.
    """
    assert len(got) == len(logits)
    for position, (token, row) in enumerate(zip(got, logits, strict=True)):
        best = float(row.max())
        assert best - float(row[token]) < NEAR_TIE, f"token {position} is {token}, not the best"


class Sequences:
    """Sequences on scattered pages of one arena, run as a test says."""

    def __init__(self, model: Model, *, pages: int = 160, seed: int = 0) -> None:
        self.model = model
        slots = 40 if model.states else 0
        self.arena = Arena(model.layout, pages, state_slots=slots)
        self.runner = Runner(model, self.arena)
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)
        self.pages: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.slots: dict[int, int] = {}
        """The state slot that each sequence goes on from."""
        self._free_slots = list(range(slots))

    def take(self, sequence: int, tokens: int) -> list[int]:
        """Give a sequence pages for this many tokens."""
        pages = self.pages.setdefault(sequence, [])
        while len(pages) * self.arena.layout.page_tokens < tokens:
            pages.append(self._free.pop())
        return pages

    def make(self, sequence: int, ids: Sequence[int], *, logits: LogitRows = LogitRows.ALL) -> Pass:
        """Return a pass that goes on with a sequence."""
        known = self.tokens.setdefault(sequence, [])
        start = len(known)
        known.extend(ids)
        pages = self.take(sequence, len(known)) if self.model.specs else []
        source, target = self.take_state(sequence, start)
        return Pass(sequence, list(ids), start, pages, logits, state_in=source, state_out=target)

    def take_state(self, sequence: int, start: int) -> tuple[int | None, int | None]:
        """Return the state slots of a sequence's next pass: it writes another than it reads."""
        if not self.model.states:
            return None, None
        source = self.slots.get(sequence) if start else None
        target = self.slots[sequence] = self._free_slots.pop(0)
        if source is not None:
            self._free_slots.append(source)
        return source, target

    def feed(self, sequence: int, ids: Sequence[int], *, chunk: int | None = None) -> torch.Tensor:
        """Run tokens of a sequence, in chunks, and return the logits of each of them."""
        rows = []
        for at in range(0, len(ids), chunk or len(ids)):
            part = ids[at : at + (chunk or len(ids))]
            rows.append(self.runner.run(Batch([self.make(sequence, part)])).logits)
        return torch.cat(rows)

    def generate(self, sequence: int, logits: torch.Tensor, count: int) -> list[int]:
        """Decode greedily from the logits of a sequence's last token."""
        out: list[int] = []
        while len(out) < count:
            out.append(int(logits[-1].argmax()))
            logits = self.feed(sequence, [out[-1]])
        return out

    def swap(self, sequence: int, index: int, ids: Sequence[int]) -> None:
        """Put another text's page in the place of a sequence's: what no test may survive.

        Exchanging two of its own pages would show nothing where attention takes all of them: a key
        carries its position.
        """
        other = -1 - sequence
        self.feed(other, list(ids)[: len(self.tokens[sequence])])
        self.arena.copy(self.pages[other][index], self.pages[sequence][index])

    def swap_state(self, sequence: int, ids: Sequence[int]) -> None:
        """Put another text's state in the place of a sequence's, likewise."""
        other = -1 - sequence
        self.feed(other, list(ids)[: len(self.tokens[sequence])])
        self.arena.copy_state(self.slots[other], self.slots[sequence])

    def share(self, sequence: int, other: int) -> None:
        """Start `other` where `sequence` is, on the same pages and a copy of its state."""
        self.tokens[other] = list(self.tokens[sequence])
        self.pages[other] = list(self.pages.get(sequence, ()))
        if self.model.states:
            self.slots[other] = self._free_slots.pop(0)
            self.arena.copy_state(self.slots[sequence], self.slots[other])

    def payloads(self, sequence: int, count: int) -> list[dict[Part, bytes]]:
        """Return the first pages of a sequence, as they would be stored."""
        return [
            {
                part: bytes(self.arena.export(page, part))
                for part in self.arena.layout.attention_parts
            }
            for page in self.pages[sequence][:count]
        ]

    def fill(
        self, sequence: int, payloads: Sequence[dict[Part, bytes]], ids: Sequence[int]
    ) -> None:
        """Start a sequence from stored pages that hold `ids`."""
        pages = self.take(sequence, len(ids))
        self.tokens[sequence] = list(ids)
        for page, parts in zip(pages, payloads, strict=True):
            for part, payload in parts.items():
                self.arena.load(page, part, payload)

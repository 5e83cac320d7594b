"""An engine with programs over a memory that remembers what each slot was computed from, for tests."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pie.page.events import Part
from pie.page.key import page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.wire.frames import Buffer
from pie.wire.programs import CallFailed, Drawn
from pie.worker.batch import Batch, Pass, StepOutput
from pie.worker.commands import StepReport
from pie.worker.generation import Vocabulary
from pie.worker.programs.calls import ModelShape
from pie.worker.programs.commands import ProgramBegan, ProgramCall
from pie.worker.programs.lane import ProgramLane
from pie.worker.programs.ledger import PageLedger
from pie.worker.programs.parking import ParkingLot
from pie.worker.programs.roster import Roster
from tests.worker.engine.driver import EOS, Driver, byte_tokenizer
from tests.worker.engine.toys import VOCAB, toy_logits

POISON = 199
"""A token whose pass comes out as no numbers."""
Cell = tuple[int, ...]
"""The tokens that a slot was computed from, its own last; -1 first where those contradict each other."""


class RememberingRunner:
    """A model whose every slot is the history that it was computed from; also the memory of that."""

    def __init__(self, pages: int, page_tokens: int) -> None:
        self.memory: list[list[Cell | None]] = [[None] * page_tokens for _ in range(pages)]
        self.page_tokens = page_tokens
        self.fails_next = False

    def run(self, batch: Batch) -> StepOutput:
        fails, self.fails_next = self.fails_next, False
        rows = [range(at, at + 1) for at in range(len(batch.passes))]
        written = [page for one in batch.passes for page in self._written(one)]
        assert len(set(written)) == len(written), "two passes write a page"
        logits = torch.stack([self._run(one) for one in batch.passes])
        if fails:
            raise RuntimeError("the device failed")
        return StepOutput(logits, rows, [None] * len(rows))

    def cell(self, pages: Sequence[int], at: int) -> Cell | None:
        return self.memory[pages[at // self.page_tokens]][at % self.page_tokens]

    def copy(self, source_id: int, target_id: int) -> None:
        self.memory[target_id] = list(self.memory[source_id])

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        size = self.page_tokens
        for source, target in zip(sources, targets, strict=True):
            found = self.memory[source // size][source % size]
            self.memory[target // size][target % size] = found

    def copy_state(self, source_slot: int, target_slot: int) -> None:
        raise AssertionError(f"slot {source_slot} was copied to {target_slot}")

    def export(self, page_id: int, part: Part) -> Any:
        assert part is Part.FULL
        return tuple(self.memory[page_id])

    def load(self, page_id: int, part: Part, payload: Any) -> None:
        assert part is Part.FULL
        self.memory[page_id] = list(payload)

    def _written(self, one: Pass) -> set[int]:
        return set(one.page_ids[one.start // self.page_tokens : -(-one.end // self.page_tokens)])

    def _run(self, one: Pass) -> torch.Tensor:
        past = [self.cell(one.page_ids, at) for at in range(one.start)]
        if one.mask is not None:
            past = [cell for cell, on in zip(past, one.mask[0].tolist(), strict=False) if on]
        history, is_plain = list[int](), one.mask is None and one.positions is None
        for cell in past:
            assert cell is not None, "a slot that was never written is read"
            history.append(cell[-1])
            is_plain &= cell == tuple(history)
        for at, token in enumerate(one.token_ids, one.start):
            history.append(token)
            page, offset = one.page_ids[at // self.page_tokens], at % self.page_tokens
            if one.write:
                self.memory[page][offset] = tuple(history) if is_plain else (-1, *history)
        logits = toy_logits(history)
        return logits * torch.nan if POISON in one.token_ids else logits


@cache
def _tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return byte_tokenizer(Path(folder))


class ToyLane(Driver):
    """An engine of which a test knows what every page should hold."""

    def __init__(self, *, pages: int, page_tokens: int, cap: int) -> None:
        self.runner = RememberingRunner(pages, page_tokens)
        super().__init__(
            self.runner,
            _tokenizer(),
            pages=pages,
            page_tokens=page_tokens,
            memory=self.runner,
            context_tokens=pages * page_tokens,
            max_running=4,
            step_tokens=3 * page_tokens,
        )
        self.page_tokens = page_tokens
        self.ledger = PageLedger(self.table, cap)
        context = pages * page_tokens
        shape = ModelShape(
            vocab_size=VOCAB,
            context_tokens=context,
            hidden_size=4,
            query_heads=1,
            kv_heads=1,
            windows=(None,),
            is_recurrent=False,
        )
        self.roster = Roster(
            self.ledger,
            self.engine._root,
            self.runner,
            shape,
            ParkingLot(self.runner, (Part.FULL,), page_bytes=1, budget_bytes=pages),
            page_tokens=page_tokens,
            vocabulary=Vocabulary(_tokenizer(), frozenset({EOS}), context),
        )
        lane = ProgramLane(self.roster, self.ledger, page_tokens=page_tokens, max_rows=16)
        self.engine.run_programs(lane)
        self.answered: list[tuple[int, list[Any]]] = []
        """Calls that were answered for good, in order, each with all its answers."""
        self._told: dict[int, list[Any]] = {}
        self._numbers = itertools.count(1)
        self.put(ProgramBegan("p"))

    def number(self) -> int:
        return next(self._numbers)

    def call(self, message: Any, *frames: Buffer) -> int:
        self.put(ProgramCall("p", message, [bytes(frame) for frame in frames]))
        self.engine.check()
        return int(message.call)

    def collect(self, report: StepReport) -> None:
        super().collect(report)
        for answer in report.programs:
            message = answer.message
            told = self._told.setdefault(message.call, [])
            assert not told or isinstance(told[-1], Drawn), "a call was answered twice"
            told.append(message)
            if not isinstance(message, Drawn) or message.finish:
                self.answered.append((message.call, self._told[message.call]))
        for call, told in self.answered:
            assert sum(not isinstance(one, Drawn) or bool(one.finish) for one in told) == 1, call

    def check_keys(self) -> None:
        """Raise `AssertionError` where a page holds anything but what its key names."""
        for slot, page in enumerate(self.table._pages):
            if page.frozen is None:
                continue
            cells = self.runner.memory[slot]
            whole = cells[-1]
            assert whole is not None
            keys = page_keys(self.engine._root, whole, self.page_tokens) if min(whole) >= 0 else []
            assert keys[-1:] == [page.frozen.key], f"page {slot} holds {whole}"
            first = len(whole) - self.page_tokens
            assert cells == [whole[: first + at + 1] for at in range(self.page_tokens)]


def failed(told: list[Any]) -> bool:
    return isinstance(told[-1], CallFailed)


def u32(numbers: Sequence[int]) -> bytes:
    return np.asarray(numbers, "<u4").tobytes()

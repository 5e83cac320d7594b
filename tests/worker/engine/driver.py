"""Drives an engine without threads and collects what it tells, for tests."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Inner, decoders, models, pre_tokenizers

from pie.page.events import Epoch, Part
from pie.page.key import RootKey
from pie.policies.manager import RetentionManager
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import (
    CachedTokens,
    FinishReason,
    Generate,
    PositionLogprobs,
    Refused,
    Sampling,
    Started,
    TokenDelta,
)
from pie.worker.batch import PageSlot, StateSlot
from pie.worker.commands import CancelOne, Command, StepReport, Submit
from pie.worker.engine import Engine, EngineLimits
from pie.worker.generation import Vocabulary
from pie.worker.outcome import StepRunner
from pie.worker.page_table import Change, PageTable
from pie.worker.scheduler import Limits
from pie.worker.state_table import StateTable
from pie.worker.working_set import ForkMemory

GREEDY = Sampling(temperature=0)
ROUTER = b"router"
EPOCH = Epoch(1)
EOS = 2


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Return a tokenizer of 256 tokens, one for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE({letter: at for at, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


class NoMemory:
    """For runners without one: nothing may be forked."""

    def copy(self, source_id: PageSlot, target_id: PageSlot) -> None:
        raise AssertionError(f"page {source_id} was copied to {target_id}")

    def copy_state(self, source_slot: StateSlot, target_slot: StateSlot) -> None:
        raise AssertionError(f"slot {source_slot} was copied to {target_slot}")


@dataclass
class Answer:
    """What a router was told of one request."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    started: Started | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    stop_string: str | None = None
    error: str | None = None
    refused: Refused | None = None
    deltas: int = 0

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "told more after the end"
        self.deltas += 1
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        assert delta.started is None or self.started is None
        self.started = delta.started or self.started
        self.logprobs += delta.logprobs or ()
        assert delta.prompt_logprobs is None or self.prompt_logprobs is None
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.stop_string = delta.stop_string
        self.error = delta.error

    @property
    def cached(self) -> CachedTokens:
        assert self.started is not None
        return self.started.cached


class Driver:
    """An engine over a runner, driven by hand. Checks all invariants after every step."""

    def __init__(
        self,
        runner: StepRunner,
        tokenizer: Tokenizer,
        *,
        pages: int,
        page_tokens: int,
        page_bytes: int = 1,
        root: RootKey = RootKey(b"r" * 32),  # noqa: B008
        context_tokens: int | None = None,
        max_running: int = 16,
        max_waiting: int = 100,
        step_tokens: int = 64,
        step_target_s: float = 0.05,
        eos: int = EOS,
        memory: ForkMemory | None = None,
        states: StateTable | None = None,
    ) -> None:
        self.table = PageTable(
            pages, page_bytes=page_bytes, part=Part.FULL, retention=RetentionManager()
        )
        self.states = states
        self.now_s = 0.0
        self.changes: list[Change] = []
        self.engine = Engine(
            runner,
            self.table,
            root,
            page_tokens=page_tokens,
            vocabulary=Vocabulary(
                tokenizer, frozenset({eos}), context_tokens or pages * page_tokens
            ),
            limits=EngineLimits(
                scheduler=Limits(max_running, max_waiting, step_tokens),
                step_target_s=step_target_s,
                store_queue_pages=1000,
            ),
            memory=memory or NoMemory(),
            on_changes=self.changes.extend,
            states=states,
            clock=self._clock,
            debug=True,
        )
        self.answers: dict[str, Answer] = {}
        self._ids = itertools.count()

    def submit(
        self, tokens: Iterable[int], max_tokens: int = 8, *, owner: bytes = ROUTER, **fields: Any
    ) -> Answer:
        """Hand a greedy request over; its answer fills up as steps run."""
        prompt = array("I", tokens)
        given: dict[str, Any] = {
            "request_id": f"r{next(self._ids)}",
            "output_start": len(prompt),
            "sampling": GREEDY,
            "epoch": EPOCH,
        }
        request = Generate(max_tokens=max_tokens, **(given | fields))
        answer = self.answers[request.request_id] = Answer()
        self.put(Submit(owner, request, prompt))
        return answer

    def cancel(self, answer: Answer) -> None:
        (request_id,) = [key for key, one in self.answers.items() if one is answer]
        self.put(CancelOne(ROUTER, request_id))

    def put(self, command: Command) -> None:
        """Hand a command to the engine."""
        self.engine.handle(command)

    def step(self) -> bool:
        ran = self.engine.step()
        self.engine.check()
        report = self.engine.take_report()
        if report is not None:
            self.collect(report)
        return ran

    def collect(self, report: StepReport) -> None:
        for deltas in report.deltas.values():
            for delta in deltas:
                self.answers[delta.request_id].take(delta)
        for _, refused in report.refused:
            self.answers[refused.request_id].refused = refused

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.step() and self.engine.is_idle:
                return
        raise AssertionError(f"not done after {limit} steps")

    def generate(self, tokens: Iterable[int], max_tokens: int = 8, **fields: Any) -> Answer:
        answer = self.submit(tokens, max_tokens, **fields)
        self.run()
        return answer

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

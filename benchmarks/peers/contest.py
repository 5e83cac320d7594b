"""What engines are compared in, and how each of them is timed.

Covers the cases, the clock around them, and the loop in which an engine's process is told which to
run. Does not cover any engine. It runs in the peers' environments too, so it imports nothing but the
standard library.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TextIO

TAIL_TOKENS = 16
"""Tokens behind a cached prefix, new in each run."""


class Kind(StrEnum):
    """What of a case is timed."""

    DECODE = "decode"
    """Tokens a second, from when every request has its first token."""
    PREFILL = "prefill"
    """Prompt tokens a second of a prompt that nobody knows, its first token included."""
    WARM = "warm"
    """Seconds to the first token of a prompt that is known but for its tail."""
    BATCH = "batch"
    """Seconds from the first request to the last token."""


@dataclass(frozen=True, slots=True)
class Case:
    """One figure."""

    name: str
    kind: Kind
    rows: int
    prompt_tokens: int
    output_tokens: int

    @property
    def unit(self) -> str:
        """The figure's unit."""
        return "s" if self.kind in {Kind.WARM, Kind.BATCH} else "tokens/s"


CASES = (
    Case("decode_1x256", Kind.DECODE, 1, 256, 33),
    Case("decode_16x256", Kind.DECODE, 16, 256, 33),
    Case("decode_16x1024", Kind.DECODE, 16, 1024, 33),
    Case("prefill_2048", Kind.PREFILL, 1, 2048, 1),
    Case("warm_first_token_2048", Kind.WARM, 1, 2048, 1),
    Case("batch_8x512_in_32_out", Kind.BATCH, 8, 512, 32),
)


class Contestant(Protocol):
    """An engine."""

    about: dict[str, object]
    """What it is, as JSON values."""

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Hand over a greedy request that ends after `max_tokens`, and return its id."""

    def step(self) -> Mapping[str, int]:
        """Go on; return how many tokens came for which request."""


def measure(contestant: Contestant, case: Case, number: int) -> float:
    """Return a case's figure.

    Args:
        contestant: Idle.
        case: What to run.
        number: Of the run: prompts that must be new are drawn from it. Those of `DECODE` are the
            same in every run, so that only the first one waits for their prefill.
    """
    once = number if case.kind is not Kind.DECODE else 0
    draw = random.Random(f"{case.name} {once}")
    prompts = [_tokens(draw, case.prompt_tokens) for _ in range(case.rows)]
    if case.kind is Kind.WARM:
        _run(contestant, [[*prompts[0], *_tokens(draw, TAIL_TOKENS)]], 1)
        prompts = [[*prompts[0], *_tokens(draw, TAIL_TOKENS)]]
    seconds, decode_rate = _run(contestant, prompts, case.output_tokens)
    match case.kind:
        case Kind.DECODE:
            return decode_rate
        case Kind.PREFILL:
            return case.prompt_tokens / seconds
        case _:
            return seconds


def _run(
    contestant: Contestant, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[float, float]:
    """Return the seconds to the last token, and the tokens a second after all first ones."""
    start_s = time.perf_counter()
    left = {contestant.submit(prompt, max_tokens): max_tokens for prompt in prompts}
    all_began_s = now_s = start_s
    after = 0
    while left:
        began = all(count < max_tokens for count in left.values())
        for request, tokens in contestant.step().items():
            after += tokens if began else 0
            left[request] -= tokens
        now_s = time.perf_counter()
        if not began:
            all_began_s = now_s
        left = {request: count for request, count in left.items() if count > 0}
    return now_s - start_s, after / (now_s - all_began_s) if after else 0.0


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(count)]


def own_output() -> TextIO:
    """Return standard output for answers, and send what else is written there to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(contestant: Contestant, answers: TextIO) -> None:
    """Run the cases that standard input names, a line each, until it ends."""
    _answer(answers, contestant.about)
    for line in sys.stdin:
        asked = json.loads(line)
        case = next(case for case in CASES if case.name == asked["case"])
        _answer(answers, {"figure": measure(contestant, case, asked["number"])})


def _answer(answers: TextIO, value: Mapping[str, object]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()

"""What the page table costs inside real engine steps.

One worker engine without sockets, SmolLM2 in bfloat16. Sixteen prompts are prefilled, decoded and
let go, then the same ones again, which match. Every call of the page table is timed, one inside
another once; its share is that of the steps' time. The working sets' calls around them are told
apart: they make the keys too.
"""

from __future__ import annotations

import functools
import os
import random
import time
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar

from benchmarks.engine_driver import EngineDriver
from pie.worker.page_table import PageTable
from pie.worker.working_set import WorkingSet

ROWS = 16
OUTPUT_TOKENS = 65
CONTEXTS = (256, 1024)
MUST_STAY_BELOW = {"decode_share": 0.02}

_TABLE = (
    "acquire",
    "allocate",
    "begin_load",
    "end_load",
    "freeze",
    "holds",
    "match",
    "matching",
    "release",
    "take_changes",
)
_WORKING_SET = ("advance", "append", "grow", "match", "release")

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Seconds inside of calls."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    def around(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, timed where it is not called by another one that is."""

        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._depth:
                return function(*args, **kwargs)
            self._depth += 1
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start_s
                self.calls += 1
                self._depth -= 1

        return timed

    def watch(self, cls: type, names: Iterable[str]) -> None:
        """Time methods of a class from now on, in this process."""
        for name in names:
            setattr(cls, name, self.around(getattr(cls, name)))


def run() -> dict[str, object]:
    """Measure, and return shares of the steps' time."""
    table, working_set = Stopwatch(), Stopwatch()
    table.watch(PageTable, _TABLE)
    working_set.watch(WorkingSet, _WORKING_SET)
    threads = os.cpu_count() or 1
    engine = EngineDriver(threads)
    draw = random.Random(0)
    figures: dict[str, object] = {"model": engine.model, "threads": threads, "rows": ROWS}
    _life(engine, [_prompt(draw, 64) for _ in range(ROWS)], table, working_set)
    for context in CONTEXTS:
        prompts = [_prompt(draw, context) for _ in range(ROWS)]
        for kind in ("new", "known"):
            figures[f"{context}_{kind}"] = _life(engine, prompts, table, working_set)
    return {**figures, "must_stay_below": MUST_STAY_BELOW}


def _life(
    engine: EngineDriver,
    prompts: list[list[int]],
    table: Stopwatch,
    working_set: Stopwatch,
) -> dict[str, float]:
    """Run all prompts to their end."""
    left = {engine.submit(prompt, OUTPUT_TOKENS): OUTPUT_TOKENS for prompt in prompts}
    began = _Share(table, working_set)
    before: dict[str, float] = {}
    decoding: _Share | None = None
    while left:
        if decoding is None and all(count < OUTPUT_TOKENS for count in left.values()):
            before, decoding = began.figures("prefill"), _Share(table, working_set)
        for request, tokens in engine.step().items():
            left[request] -= tokens
        left = {request: count for request, count in left.items() if count}
    assert decoding is not None
    return {**before, **decoding.figures("decode")}


class _Share:
    """From its making on: how much of the time is the stopwatches'."""

    def __init__(self, table: Stopwatch, working_set: Stopwatch) -> None:
        self._watches = {"": table, "working_set_": working_set}
        self._before = {name: one.seconds for name, one in self._watches.items()}
        self._start_s = time.perf_counter()

    def figures(self, phase: str) -> dict[str, float]:
        seconds = time.perf_counter() - self._start_s
        shares = {
            f"{phase}_{name}share": round((one.seconds - self._before[name]) / seconds, 5)
            for name, one in self._watches.items()
        }
        return {f"{phase}_ms": round(seconds * 1000, 1), **shares}


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(tokens)]

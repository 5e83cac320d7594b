"""Sixteen identical prompts at once: how much one engine computes, and how long the last one waits.

One worker engine without sockets, SmolLM2 in bfloat16, prompts of 2,048 tokens that nobody has seen.
Each run takes one prompt alone and then sixteen times another one, so that whatever else the machine
does falls on both. Every token that runs through the model counts, the last one of each prompt too.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.engine_driver import EngineDriver

PROMPT_TOKENS = 2048
REQUESTS = 16
RUNS = 5
MUST_STAY_BELOW = {"computed_over_one_prompt": 1.02, "last_first_token_over_alone": 1.5}


def run() -> dict[str, object]:
    """Measure, and return tokens, milliseconds and ratios."""
    threads = os.cpu_count() or 1
    engine = EngineDriver(threads)
    draw = random.Random(0)
    alone: list[float] = []
    together: list[float] = []
    computed: list[int] = []
    for number in range(RUNS + 1):
        alone_ms, _ = _first_tokens(engine, _prompt(draw), 1)
        together_ms, tokens = _first_tokens(engine, _prompt(draw), REQUESTS)
        if number:
            alone.append(alone_ms)
            together.append(together_ms)
            computed.append(tokens)
    return {
        "model": engine.model,
        "threads": threads,
        "requests": REQUESTS,
        "prompt_tokens": PROMPT_TOKENS,
        "alone_ms": _spread(alone),
        "last_of_all_ms": _spread(together),
        "computed_tokens": _spread(computed),
        "computed_over_one_prompt": round(max(computed) / PROMPT_TOKENS, 4),
        "last_first_token_over_alone": round(
            statistics.median(together) / statistics.median(alone), 3
        ),
        "must_stay_below": MUST_STAY_BELOW,
    }


def _first_tokens(engine: EngineDriver, prompt: Sequence[int], requests: int) -> tuple[float, int]:
    """Return milliseconds until each of `requests` has a token, and the tokens computed."""
    before = _computed(engine)
    start_s = time.perf_counter()
    left = {engine.submit(prompt, 1) for _ in range(requests)}
    while left:
        left -= engine.step().keys()
    elapsed_ms = (time.perf_counter() - start_s) * 1000
    return elapsed_ms, _computed(engine) - before


def _computed(engine: EngineDriver) -> int:
    return engine.status.prefill_tokens + engine.status.decode_tokens


def _prompt(draw: random.Random) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "min": round(min(values), 1),
        "max": round(max(values), 1),
    }

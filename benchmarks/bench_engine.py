"""Prefill and decode of the model half of a worker, beside transformers' own in the same process.

Each run takes Pie's compiled attention, Pie's torch attention and transformers (SDPA attention,
dynamic cache) one after the other, so that whatever else the machine does falls on all of them.
SmolLM2-135M in bfloat16, all of the machine's cores, no scheduler and no sampling but the argmax.
Decode goes on from random keys and values: what they are makes no difference to its speed.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import DynamicCache

from benchmarks.reference import Reference
from pie.worker.arena import Arena
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.batch import Batch, Pass
from pie.worker.model import load_model
from pie.worker.runner import Runner
from pie.worker.settings import ModelSettings

RUNS = 5
STEPS = 16
FIRST_TOKEN = 7
PREFILL_TOKENS = 2048
CHUNK_TOKENS = 512
DECODE = ((1, 256), (4, 1024), (16, 256), (16, 1024))
MUST_REACH = {"prefill_2048": 1.1, "decode_1x256": 1.2, "decode_16x256": 1.5}
MUST_REACH_TORCH = {"decode_16x1024": 1.3}

Measure = Callable[[], float]
"""Runs once and returns tokens a second."""


def run() -> dict[str, object]:
    """Measure, and return tokens a second and the ratios to transformers."""
    threads = os.cpu_count() or 1
    torch.set_num_threads(threads)
    model = load_model(ModelSettings(dtype="bfloat16"))
    arena = Arena(model.layout, 1400)
    for tensor in (*arena.keys, *arena.values):
        tensor.normal_()
    compiled, plain = Runner(model, arena), Runner(model, arena, TorchBackend())
    transformers = Reference(model.folder, torch.bfloat16, threads)
    draw = random.Random(0)

    def text(tokens: int) -> list[int]:
        return [draw.randrange(3, model.vocab_size) for _ in range(tokens)]

    runners = {"pie": compiled, "pie_torch": plain}
    contestants: dict[str, dict[str, Measure]] = {}
    for name, chunk in (("prefill_2048", PREFILL_TOKENS), ("prefill_2048_in_512s", CHUNK_TOKENS)):
        contestants[name] = {
            **{key: partial(_prefill, runner, text, chunk) for key, runner in runners.items()},
            "transformers": partial(_prefill_theirs, transformers, text),
        }
    for rows, context in DECODE:
        contestants[f"decode_{rows}x{context}"] = {
            **{key: partial(_decode, r, rows, context) for key, r in runners.items()},
            "transformers": partial(_decode_theirs, transformers, rows, context),
        }
    results: dict[str, object] = {
        "model": model.name,
        "threads": threads,
        "backend": compiled.backends[0].name,
        "unit": "tokens/s",
    }
    for name, measures in contestants.items():
        results[name] = _compare(measures)
    results["must_reach"] = MUST_REACH
    results["must_reach_torch"] = MUST_REACH_TORCH
    return results


def _compare(measures: dict[str, Measure]) -> dict[str, object]:
    """Run all in turn, once to warm up, and return their spreads and ratios of medians."""
    rates: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(RUNS + 1):
        for name, measure in measures.items():
            rate = measure()
            if number:
                rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{
            name: {
                "median": round(medians[name], 1),
                "min": round(min(values), 1),
                "max": round(max(values), 1),
            }
            for name, values in rates.items()
        },
        "ratio": round(medians["pie"] / medians["transformers"], 2),
        "ratio_torch": round(medians["pie_torch"] / medians["transformers"], 2),
    }


def _pages(runner: Runner, rows: int, tokens: int) -> list[list[int]]:
    """Return scattered pages for each of `rows` sequences."""
    count = -(-tokens // runner.arena.layout.page_tokens)
    drawn = random.Random(1).sample(range(runner.arena.num_pages), rows * count)
    return [drawn[row * count : (row + 1) * count] for row in range(rows)]


def _prefill(runner: Runner, text: Callable[[int], list[int]], chunk: int) -> float:
    ids, pages = text(PREFILL_TOKENS), _pages(runner, 1, PREFILL_TOKENS)[0]
    start_s = time.perf_counter()
    for at in range(0, PREFILL_TOKENS, chunk):
        output = runner.run(Batch([Pass(0, ids[at : at + chunk], at, pages)]))
        int(output.logits[-1].argmax())
    return PREFILL_TOKENS / (time.perf_counter() - start_s)


def _decode(runner: Runner, rows: int, context: int) -> float:
    pages = _pages(runner, rows, context + STEPS)
    last = [FIRST_TOKEN] * rows
    start_s = time.perf_counter()
    for step in range(STEPS):
        passes = [Pass(row, [last[row]], context + step, pages[row]) for row in range(rows)]
        last = runner.run(Batch(passes)).logits.argmax(-1).tolist()
    return rows * STEPS / (time.perf_counter() - start_s)


def _prefill_theirs(reference: Reference, text: Callable[[int], list[int]]) -> float:
    return PREFILL_TOKENS / reference.prefill_s(text(PREFILL_TOKENS))


@torch.inference_mode()
def _decode_theirs(reference: Reference, rows: int, context: int) -> float:
    config = reference.model.config
    cache = DynamicCache(config=config)
    shape = (rows, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(*torch.randn((2, *shape)).bfloat16(), layer)
    last = torch.full((rows, 1), FIRST_TOKEN)
    start_s = time.perf_counter()
    for _ in range(STEPS):
        output = reference.model(last, cache=cache, logits_to_keep=1)
        last = output.logits[:, -1].argmax(-1, keepdim=True)
    return rows * STEPS / (time.perf_counter() - start_s)

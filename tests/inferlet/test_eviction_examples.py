"""The eviction programs that ship, against their papers' rules, written anew and slow on purpose.

The reference runs the whole text from the start for every token, in float64, with each token attending to the
slots that the rule had kept when it was written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.worker.programs.local import LocalEngine
from tests.house.tree import ROOT
from tests.inferlet.running import run
from tests.support.masked import masked

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = ROOT / "examples/inferlets"
PROMPT = (
    "Why do lighthouses blink? Tell me about the keeper, his dog and the storm of that winter. " * 2
)

TELLS = """
import json
import pie.inferlet.working_set as _sets
_drop = _sets.WorkingSet.drop
def _told(self, slots):
    pending = _drop(self, slots)
    print(json.dumps(self.slots.tolist()), flush=True)
    return pending
_sets.WorkingSet.drop = _told
"""
"""Put before a program: it prints which slots are left after each drop."""

Attention = list[torch.Tensor]
"""Each layer's, `[heads, tokens, tokens]`."""

Rule = Callable[[Attention, list[int]], list[int]]
"""Takes all attention so far and the live slots; returns those that stay."""


def prompt_tokens(folder: Path) -> list[int]:
    template = ChatTemplate.load(folder)
    assert template is not None
    text = template.render([{"role": "user", "content": PROMPT}])
    return Tokenizer.load(folder).encode(text)


def play(
    module: PreTrainedModel, prompt: Sequence[int], steps: int, rule: Rule
) -> tuple[list[int], list[list[int]]]:
    """Return the tokens drawn, and the slots kept after each step that dropped some."""
    tokens, live = list(prompt), list(range(len(prompt)))
    rows = [list(range(at + 1)) for at in range(len(prompt))]
    drawn: list[int] = []
    kept: list[list[int]] = []
    while True:
        allowed = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for at, row in enumerate(rows):
            allowed[at, row] = True
        logits, attention = masked(module, tokens, allowed)
        drawn.append(int(logits[-1].argmax()))
        after = rule(attention, live)
        if after != live:
            kept.append(after)
        if len(drawn) == steps:
            return drawn, kept
        live = [*after, len(tokens)]
        rows.append(live)
        tokens.append(drawn[-1])


def sinks(first: int, window: int) -> Rule:
    return lambda _, live: (
        live[:first] + live[first:][-window:] if len(live) > first + window else live
    )


def tova(budget: int) -> Rule:
    def rule(attention: Attention, live: list[int]) -> list[int]:
        paid = {slot: sum(float(one[:, -1, slot].sum()) for one in attention) for slot in live}
        while len(paid) > budget:
            del paid[min(paid, key=lambda slot: paid[slot])]
        return sorted(paid)

    return rule


def h2o(heavy: int, recent: int) -> Rule:
    def rule(attention: Attention, live: list[int]) -> list[int]:
        mass = {slot: sum(float(one[:, :, slot].sum()) for one in attention) for slot in live}
        new = live[-recent:]
        old = [slot for slot in live if slot not in new]
        while len(old) > heavy:
            old.remove(min(old, key=lambda slot: mass[slot]))
        return old + new

    return rule


async def check(
    local: LocalEngine,
    folder: Path,
    module: PreTrainedModel,
    name: str,
    rule: Rule,
    steps: int = 14,
    **arguments: object,
) -> None:
    source = TELLS + (PROGRAMS / f"{name}.py").read_text("utf-8")
    ran = await run(local, source, prompt=PROMPT, max_tokens=steps, **arguments)
    prompt = prompt_tokens(folder)
    drawn, kept = play(module, prompt, steps, rule)
    assert ran.result == Tokenizer.load(folder).decode(drawn)
    assert [json.loads(line) for line in ran.ended.output.splitlines()] == kept
    assert kept, "the rule never bit"


@pytest.mark.parametrize(("first", "window"), [(4, 28), (1, 16), (20, 40)])
async def test_attention_sink_keeps_the_first_slots_and_a_window(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel, first: int, window: int
) -> None:
    await check(
        local,
        model_folder,
        reference,
        "attention-sink",
        sinks(first, window),
        sinks=first,
        window=window,
    )


@pytest.mark.parametrize("budget", [40, 100])
async def test_tova_drops_what_the_newest_token_attends_to_least(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel, budget: int
) -> None:
    await check(local, model_folder, reference, "tova-attention", tova(budget), budget=budget)


@pytest.mark.parametrize(("heavy", "recent"), [(20, 20), (60, 8)])
async def test_h2o_keeps_heavy_hitters_and_recent_slots(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel, heavy: int, recent: int
) -> None:
    rule = h2o(heavy, recent)
    await check(local, model_folder, reference, "trackb-h2o", rule, heavy=heavy, recent=recent)


@pytest.mark.parametrize(("keep", "window", "kernel"), [(0.25, 16, 5), (0.5, 8, 1)])
async def test_snapkv_keeps_what_the_end_of_the_prompt_attends_to(
    local: LocalEngine,
    model_folder: Path,
    reference: PreTrainedModel,
    keep: float,
    window: int,
    kernel: int,
) -> None:
    """The prompt is scored once, all but its last token, which sees only what is left."""
    source = TELLS + (PROGRAMS / "snapkv-eviction.py").read_text("utf-8")
    ran = await run(
        local, source, prompt=PROMPT, keep=keep, window=window, kernel=kernel, max_tokens=12
    )
    prompt = prompt_tokens(model_folder)
    seen = len(prompt) - 1
    _, attention = masked(reference, prompt[:-1], torch.ones(seen, seen, dtype=torch.bool))
    paid = [
        sum(float(one[:, seen - window :, slot].sum()) for one in attention)
        for slot in range(seen - window)
    ]
    half = kernel // 2
    smooth = [sum(paid[max(0, at - half) : at + half + 1]) for at in range(len(paid))]
    budget = max(1, int(keep * len(prompt)) - window)
    best = sorted(range(len(smooth)), key=lambda at: -smooth[at])[:budget]
    live = sorted(best) + list(range(seen - window, seen))
    assert [json.loads(line) for line in ran.ended.output.splitlines()] == [live]

    tokens, rows = list(prompt), [list(range(at + 1)) for at in range(seen)]
    drawn: list[int] = []
    while len(drawn) < 12:
        live = [*live, len(rows)]
        rows.append(live)
        allowed = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
        for at, row in enumerate(rows):
            allowed[at, row] = True
        logits, _ = masked(reference, tokens, allowed)
        drawn.append(int(logits[-1].argmax()))
        tokens.append(drawn[-1])
    assert ran.result == Tokenizer.load(model_folder).decode(drawn)

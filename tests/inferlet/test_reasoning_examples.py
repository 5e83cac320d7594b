"""Programs that ship and steer what a model says: constraints, contrast, thoughts and tools."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pie.tokens.tokenizer import Tokenizer
from pie.worker.programs.host import ProgramToRun
from pie.worker.programs.local import LocalEngine
from tests.inferlet.running import run
from tests.inferlet.test_other_examples import PROGRAMS, rendered, source
from tests.support.program_folder import EOS


@pytest.mark.asyncio(loop_scope="session")
async def test_constrained_json_gives_what_the_schema_describes(local: LocalEngine) -> None:
    ran = await run(local, source("constrained-json"), prompt="Tom has three apples.")
    found = json.loads(ran.result)
    assert set(found) == {"name", "count"}
    assert isinstance(found["name"], str)
    assert 0 <= found["count"] <= 99


@pytest.mark.asyncio(loop_scope="session")
async def test_a_grammar_holds_and_a_bad_one_is_a_sentence(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import BadCallError, Context, Sampler, greedy

        async def main(ctx: Context):
            ctx.user("Which?")
            (one, two, three) = await ctx.fork(3)
            told = [
                await one.generate(greedy(), 32, choice=["red", "green"]),
                await two.generate(Sampler(seed=1), 32, regex="[ab]{3}c"),
                await three.generate(greedy(), 32, grammar='start: "x" "y"'),
                await three.user("And?").generate(greedy(), 32, regex="[0-9]{2}"),
            ]
            for wrong in (
                lambda: ctx.generate(greedy(), 8, regex="("),
                lambda: ctx.generate(lambda logits: 5, 8, regex="a"),
                lambda: ctx.generate(greedy(), 8, regex="a", choice=["b"]),
            ):
                try:
                    await wrong()
                except BadCallError as error:
                    told.append(type(error).__name__)
            return "|".join(told)
        """,
    )
    *told, first, second, third = ran.result.split("|")
    assert first == second == third == "BadCallError"
    patterns = ("red|green", "[ab]{3}c", "xy", "[0-9]{2}")
    for pattern, text in zip(patterns, told, strict=True):
        assert re.fullmatch(pattern, text), (pattern, text)


def contrasted(module: PreTrainedModel, sides: list[list[int]], count: int) -> list[int]:
    """Decode contrastively, each step on whole texts."""
    out: list[int] = []
    while len(out) < count and EOS not in out:
        rows = []
        for side in sides:
            with torch.inference_mode():
                logits = module(torch.tensor([[*side, *out]]), use_cache=False).logits[0, -1]
            rows.append(logits.double().numpy())
        allowed = np.exp(rows[0]) >= 0.1 * np.exp(rows[0]).max()
        out.append(int(np.where(allowed, 1.5 * rows[0] - 0.5 * rows[1], -np.inf).argmax()))
    return out


@pytest.mark.asyncio(loop_scope="session")
async def test_contrastive_decoding_is_that_of_whole_texts(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    document, prompt = "The lamp is green, they say.", "Which colour is it?"
    ran = await run(local, source("contrastive"), document=document, prompt=prompt, max_tokens=12)
    sides = [
        rendered(model_folder, ("user", f"{document}\n\n{prompt}")),
        rendered(model_folder, ("user", prompt)),
    ]
    want = contrasted(reference, sides, 12)
    assert ran.result == Tokenizer.load(model_folder).decode(want)


CHECK = '''

async def check(ctx: Context, prompt: str) -> str:
    """Say the values of all thoughts of one step, and that of one thought in two ways."""
    system = "Think step by step. Write one short step at a time."
    slow = ctx.new_context()
    slow.system(system).user(prompt).assistant("First, add.").user(ASK)
    plain = await slow.score("yes") - await slow.score("no")
    fast = ctx.new_context()
    shared = await value(fast.system(system).user(prompt).assistant("First, add."))
    assert abs(plain - shared) < 1e-3, (plain, shared)
    forks = await ctx.system(system).user(prompt).fork(3)
    texts = [
        await fork.generate(Sampler(0.8, seed=at), 10, ["\\n"]) for at, fork in enumerate(forks)
    ]
    values = [await value(fork) for fork in forks]
    at = max(range(3), key=values.__getitem__)
    return f"step 1, {values[at]:+.2f}: {texts[at].strip()}"
'''


@pytest.mark.asyncio(loop_scope="session")
async def test_a_tree_of_thought_goes_on_with_the_best_thought(local: LocalEngine) -> None:
    options: dict[str, Any] = {"prompt": "What is 2 + 3 * 4?"}
    tree = source("tree-of-thought")
    ran = await run(
        local, tree, **options, depth=2, branches=3, keep=2, step_tokens=10, max_tokens=8
    )
    assert ran.result
    assert len(ran.said) == 2
    program = ProgramToRun("tree.py", tree + CHECK, options, "check")
    ended = await (await local.host.start(program)).ended
    assert ended.result == ran.said[0], ended.error


@pytest.mark.asyncio(loop_scope="session")
async def test_an_agent_uses_its_tool_and_reads_what_came(local: LocalEngine) -> None:
    ran = await run(local, source("agent"), prompt="What is 6 times 7?", steps=3, temperature=1.5)
    calculate = runpy.run_path(str(PROGRAMS / "agent.py"))["calculate"]
    for line, seen in zip(ran.said, ran.said[1:], strict=False):
        if action := re.fullmatch(r"Action: calculate\[(.*)\]", line):
            assert seen == f"Observation: {calculate(action[1])}"
    assert ran.said[-1] == f"Answer: {ran.result}"


@pytest.mark.parametrize(
    ("text", "result"),
    [("12*(3+4)", "84"), ("-2 + 1/4", "-1.75"), ("1/0", "error: division by zero")],
)
def test_the_agents_calculator_calculates(text: str, result: str) -> None:
    assert runpy.run_path(str(PROGRAMS / "agent.py"))["calculate"](text) == result

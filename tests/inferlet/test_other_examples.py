"""Programs that ship and do not evict, against slow ways to the same answer."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.worker.programs.local import LocalEngine
from tests.house.tree import ROOT
from tests.inferlet.running import run, until_idle
from tests.support.program_folder import EOS

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = ROOT / "examples/inferlets"


def source(name: str) -> str:
    return (PROGRAMS / f"{name}.py").read_text("utf-8")


def rendered(folder: Path, *turns: tuple[str, str]) -> list[int]:
    template = ChatTemplate.load(folder)
    assert template is not None
    text = template.render([{"role": role, "content": content} for role, content in turns])
    return Tokenizer.load(folder).encode(text)


def logprobs(module: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        row: torch.Tensor = module(torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return row.log_softmax(-1)


def greedy(module: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    out: list[int] = []
    while len(out) < count:
        token = int(logprobs(module, [*tokens, *out]).argmax())
        if token == EOS:
            break
        out.append(token)
    return out


def beams(module: PreTrainedModel, tokens: list[int], width: int, count: int) -> list[int]:
    """Search on whole texts, each computed from the start."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(count):
        options = []
        for score, text in live:
            values, ids = logprobs(module, [*tokens, *text]).topk(width)
            options += [
                (score + value, [*text, token])
                for value, token in zip(values.tolist(), ids.tolist(), strict=True)
            ]
        options.sort(key=lambda one: -one[0])
        best = options[: width - len(done)]
        done += [one for one in best if one[1][-1] == EOS]
        live = [one for one in best if one[1][-1] != EOS]
    return max(done + live, key=lambda one: one[0])[1]


async def test_speculative_decoding_gives_the_greedy_text_in_fewer_passes(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    prompt = "again and again and again and again"
    ran = await run(local, source("speculative"), prompt=prompt, max_tokens=40, ngram=1, draft=4)
    want = greedy(reference, rendered(model_folder, ("user", prompt)), 40)
    assert ran.result == Tokenizer.load(model_folder).decode(want)
    found = re.match(r"(\d+) tokens in (\d+) passes, (\d+) of them guessed", ran.said[0])
    assert found
    tokens, passes, guessed = map(int, found.groups())
    assert tokens <= passes + guessed


@pytest.mark.parametrize("width", [1, 3])
async def test_beam_search_finds_what_a_search_on_whole_texts_finds(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel, width: int
) -> None:
    ran = await run(local, source("beam-search"), prompt="The lamp", width=width, max_tokens=6)
    want = beams(reference, rendered(model_folder, ("user", "The lamp")), width, 6)
    assert ran.result == Tokenizer.load(model_folder).decode(want)
    await until_idle(local)


async def test_branches_of_a_prefix_tree_answer_as_if_alone(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    document = "The keeper lights the lamp at dusk and winds the clock by hand. " * 2
    ran = await run(
        local, source("prefix-tree"), document=document, questions="Who?|When?", max_tokens=6
    )
    tokenizer, lines = Tokenizer.load(model_folder), []
    for question in ("Who?", "When?"):
        prompt = rendered(model_folder, ("system", document), ("user", question))
        lines.append(f"{question}\n  {tokenizer.decode(greedy(reference, prompt, 6))}")
    assert ran.result == "\n".join(lines)
    assert "computed once for 2 branches" in ran.said[0]


async def test_a_consensus_is_what_most_answers_say(local: LocalEngine) -> None:
    options = {"prompt": "Six times seven?", "pattern": "[a-z]", "answers": 7, "max_tokens": 24}
    ran = await run(local, source("consensus"), **options)
    votes = Counter({said.split(": ")[1]: int(said.split(" of ")[0]) for said in ran.said})
    assert ran.result == votes.most_common(1)[0][0]
    assert (await run(local, source("consensus"), **options)).result == ran.result


async def test_the_cache_explorer_counts_what_is_shared(local: LocalEngine) -> None:
    text = "Fog came in from the bay and the horn began to sound, low and slow, all night. "
    ran = await run(local, source("cache-explorer"), prompt=f"{text}|{text} And then?|Other")
    counts = [int(said.split(" of ")[0]) for said in ran.said]
    assert counts[0] == 0
    assert counts[1] > 16
    assert ran.result.startswith(f"{sum(counts)} of ")

"""Float32 output over pages is transformers' own, however the tokens came to their pages.

Each way of running is a scenario that returns what Pie computed and what transformers did. Every
scenario runs twice: as it is, and with one page exchanged for another text's before the last pass, which must show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel

from pie.worker.batch import Batch, LogitRows, Pass
from tests.support.equality import Sequences, assert_same_logits, assert_same_tokens
from tests.support.models import VOCAB_SIZE, tiny_model, tiny_module

KINDS = ("llama", "qwen3", "gemma3", "gpt2", "gemma2", "mistral")
PAGE_TOKENS = 8
LONG = 100


def text(tokens: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (tokens,), generator=draw).tolist()


@functools.cache
def oracle(kind: str) -> PreTrainedModel:
    return tiny_module(kind)


def logits_of(module: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = module(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def sequences(kind: str, attention: str) -> Sequences:
    return Sequences(tiny_model(kind, page_tokens=PAGE_TOKENS, attention=attention), pages=260)


Tamper = Callable[[Sequences, int, int], None]
"""Called before the last pass with the sequence and the number of its full pages."""

Result = tuple[torch.Tensor, torch.Tensor]
"""What Pie computed and what transformers did."""

Scenario = Callable[[str, str, Tamper], Result]


def cold_then_decode(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    got = [run.feed(1, ids[:-1])]
    tamper(run, 1, (LONG - 1) // PAGE_TOKENS)
    got.append(run.feed(1, ids[-1:]))
    return torch.cat(got), logits_of(oracle(kind), ids)


def chunked(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    got = [run.feed(1, ids[:33], chunk=33), run.feed(1, ids[33:80], chunk=7)]
    tamper(run, 1, 80 // PAGE_TOKENS)
    got.append(run.feed(1, ids[80:]))
    return torch.cat(got), logits_of(oracle(kind), ids)


def token_by_token(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(45)
    got = [run.feed(1, ids[:-1], chunk=1)]
    tamper(run, 1, 44 // PAGE_TOKENS)
    got.append(run.feed(1, ids[-1:]))
    return torch.cat(got), logits_of(oracle(kind), ids)


def shared_prefix(kind: str, attention: str, tamper: Tamper) -> Result:
    """A second sequence goes on from the first one's pages."""
    run, ids = sequences(kind, attention), text(LONG)
    shared = 64
    run.feed(1, ids[:shared])
    run.pages[2], run.tokens[2] = list(run.pages[1]), list(ids[:shared])
    tamper(run, 2, shared // PAGE_TOKENS)
    got = run.feed(2, ids[shared:], chunk=30)
    return got, logits_of(oracle(kind), ids)[shared:]


def fully_cached(kind: str, attention: str, tamper: Tamper) -> Result:
    """Only the last token is computed, and nothing is written."""
    run, ids = sequences(kind, attention), text(64)
    run.feed(1, ids)
    tamper(run, 1, 64 // PAGE_TOKENS)
    before = run.payloads(1, 64 // PAGE_TOKENS)
    one = Pass(1, ids[-1:], 63, run.pages[1], write=False)
    got = run.runner.run(Batch([one])).logits
    assert run.payloads(1, 64 // PAGE_TOKENS) == before
    return got, logits_of(oracle(kind), ids)[-1:]


def moved_to_another_arena(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    stored = 72
    run.feed(1, ids[:stored], chunk=40)
    other = sequences(kind, attention)
    other.fill(5, run.payloads(1, stored // PAGE_TOKENS), ids[:stored])
    tamper(other, 5, stored // PAGE_TOKENS)
    return other.feed(5, ids[stored:], chunk=11), logits_of(oracle(kind), ids)[stored:]


def mixed_batch_of_sixteen(kind: str, attention: str, tamper: Tamper) -> Result:
    """One step decodes some sequences, starts some, and goes on with a chunk of the others."""
    run = sequences(kind, attention)
    texts = {number: text(5 + 7 * number, seed=number) for number in range(16)}
    last = {number: (1, 9, 1, 40)[number % 4] for number in range(16)}
    for number, ids in texts.items():
        if len(ids) > last[number]:
            run.feed(number, ids[: -last[number]], chunk=50)
    tamper(run, 15, len(run.tokens[15]) // PAGE_TOKENS)
    passes = [run.make(n, ids[-last[n] :]) for n, ids in texts.items()]
    output = run.runner.run(Batch(passes))
    want = [
        logits_of(oracle(kind), ids)[-len(one.token_ids) :]
        for one, ids in zip(passes, texts.values(), strict=True)
    ]
    assert [len(rows) for rows in output.rows] == [len(rows) for rows in want]
    return output.logits, torch.cat(want)


SCENARIOS: tuple[Scenario, ...] = (
    cold_then_decode,
    chunked,
    token_by_token,
    shared_prefix,
    fully_cached,
    moved_to_another_arena,
    mixed_batch_of_sixteen,
)


def leave(_run: Sequences, _sequence: int, _pages: int) -> None:
    """Do nothing."""


def swap_one(run: Sequences, sequence: int, pages: int) -> None:
    """Exchange the last full page but one for another text's; a window sees no earlier one."""
    run.swap(sequence, pages - 2, text(LONG + 30, seed=77))


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_logits_are_transformers_own(scenario: Scenario, kind: str, attention: str) -> None:
    assert_same_logits(*scenario(kind, attention, leave))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_swapped_page_shows(scenario: Scenario, kind: str) -> None:
    got, want = scenario(kind, "auto", swap_one)
    with pytest.raises(AssertionError, match="logits are off"):
        assert_same_logits(got, want)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_generate(kind: str) -> None:
    run, ids = sequences(kind, "auto"), text(50)
    got = run.generate(1, run.feed(1, ids, chunk=20), 24)
    made = cast(Any, oracle(kind)).generate(
        torch.tensor([ids]),
        do_sample=False,
        max_new_tokens=24,
        min_new_tokens=24,
        eos_token_id=None,
    )
    theirs = made[0, len(ids) :].tolist()
    assert_same_tokens(got, logits_of(oracle(kind), ids + got)[len(ids) - 1 : -1])
    agree = next((i for i, (a, b) in enumerate(zip(got, theirs, strict=True)) if a != b), 24)
    if agree < 24:
        row = logits_of(oracle(kind), ids + theirs[:agree])[-1].topk(2).values
        assert float(row[0] - row[1]) < 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_rows_asked_for_get_logits(kind: str) -> None:
    run = sequences(kind, "auto")
    passes = [
        run.make(1, text(9, 1), logits=LogitRows.LAST),
        run.make(2, text(7, 2), logits=LogitRows.NONE),
        run.make(3, text(5, 3), logits=LogitRows.ALL),
    ]
    output = run.runner.run(Batch(passes))
    assert [list(rows) for rows in output.rows] == [[0], [], [1, 2, 3, 4, 5]]
    assert output.logits.dtype is torch.float32
    assert_same_logits(output.of(0), logits_of(oracle(kind), text(9, 1))[-1:])
    assert_same_logits(output.of(2), logits_of(oracle(kind), text(5, 3)))


def test_a_batch_may_ask_for_no_logits_at_all() -> None:
    run = sequences("llama", "auto")
    output = run.runner.run(Batch([run.make(1, text(9), logits=LogitRows.NONE)]))
    assert output.logits.shape == (0, VOCAB_SIZE)
    assert_same_logits(
        run.feed(1, text(3, 1)), logits_of(oracle("llama"), text(9) + text(3, 1))[9:]
    )


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_mask_hides_slots(kind: str) -> None:
    """Hiding the first slots of a model without positions in its cache equals never having them:
    here, what a mask of everything gives must be the unmasked result, and hiding must change it."""
    run, ids = sequences(kind, "auto"), text(30)
    whole = logits_of(oracle(kind), ids)
    everything = torch.ones((30, 30), dtype=torch.bool)
    pages = run.take(1, 30)
    same = run.runner.run(Batch([Pass(1, ids, 0, pages, LogitRows.ALL, mask=everything)]))
    assert_same_logits(same.logits, whole)
    hidden = everything.clone()
    hidden[20:, 15:20] = False
    other = run.runner.run(Batch([Pass(1, ids, 0, pages, LogitRows.ALL, mask=hidden)]))
    assert_same_logits(other.logits[:20], whole[:20])
    with pytest.raises(AssertionError):
        assert_same_logits(other.logits[20:], whole[20:])


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_scores_are_transformers_attention_weights(kind: str) -> None:
    run, ids = sequences(kind, "auto"), text(40)
    run.feed(1, ids[:30])
    one = Pass(1, ids[30:], 30, run.take(1, 40), LogitRows.ALL, scores_queries=3)
    output = run.runner.run(Batch([one, run.make(2, text(9))]))
    with torch.inference_mode():
        theirs = oracle(kind)(torch.tensor([ids]), output_attentions=True).attentions
    want = torch.stack([layer[0, :, -3:].sum(1) for layer in theirs])
    scores = output.scores[0]
    assert scores is not None
    assert torch.allclose(scores, want, atol=1e-5)
    assert output.scores[1] is None
    assert_same_logits(output.of(0), logits_of(oracle(kind), ids)[30:])


def test_positions_may_differ_from_slots() -> None:
    """GPT-2 learned its positions, so a shifted text gives other logits, and the right ones."""
    run, ids = sequences("gpt2", "auto"), text(12)
    shifted = list(range(100, 112))
    one = Pass(1, ids, 0, run.take(1, 12), LogitRows.ALL, positions=shifted)
    with torch.inference_mode():
        want = oracle("gpt2")(torch.tensor([ids]), position_ids=torch.tensor([shifted])).logits[0]
    assert_same_logits(run.runner.run(Batch([one])).logits, want)

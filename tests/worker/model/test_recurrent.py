"""Float32 output of recurrent and hybrid models is transformers' own, however the states came there.

As with pages (`test_equality`), every scenario runs as it is and with a state exchanged for another
text's before the last pass, which must show.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from pie.page.events import Part
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.errors import BatchError
from pie.worker.model import Model
from pie.worker.selfcheck import verify
from tests.support.equality import (
    LOGIT_TOLERANCE,
    Sequences,
    assert_same_logits,
    assert_same_tokens,
)
from tests.support.models import RECURRENT, STEPPED, VOCAB_SIZE, tiny_model, tiny_module

KINDS = (*RECURRENT, *STEPPED)
PAGE_TOKENS = 8
LONG = 90

TOLERANCE = {"qwen3_next": 5e-4, "jamba": 1e-4}
"""Where it is not 1e-5: transformers' own runs with and without its cache differ by up to 2e-4 and
3e-5 on these two (18 runs of 90 tokens; 4e-6 on the others)."""


def text(tokens: int, seed: int = 0) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (tokens,), generator=draw).tolist()


@functools.cache
def oracle(kind: str) -> PreTrainedModel:
    return tiny_module(kind)


@functools.cache
def served(kind: str, attention: str) -> Model:
    return verify(tiny_model(kind, page_tokens=PAGE_TOKENS, attention=attention))


def logits_of(kind: str, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = oracle(kind)(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def sequences(kind: str, attention: str = "auto") -> Sequences:
    model = served(kind, attention)
    return Sequences(model, pages=260 if model.specs else 0)


def assert_same(kind: str, got: torch.Tensor, want: torch.Tensor) -> None:
    assert_same_logits(got, want, TOLERANCE.get(kind, LOGIT_TOLERANCE))


Tamper = Callable[[Sequences, int], None]
Result = tuple[torch.Tensor, torch.Tensor]
Scenario = Callable[[str, str, Tamper], Result]


def prefill_then_decode(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    got = [run.feed(1, ids[:-3]), run.feed(1, ids[-3:-1], chunk=1)]
    tamper(run, 1)
    got.append(run.feed(1, ids[-1:]))
    return torch.cat(got), logits_of(kind, ids)


def chunked(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    got = [run.feed(1, ids[:33], chunk=33), run.feed(1, ids[33:80], chunk=7)]
    tamper(run, 1)
    got.append(run.feed(1, ids[80:]))
    return torch.cat(got), logits_of(kind, ids)


def token_by_token(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(30)
    got = [run.feed(1, ids[:-1], chunk=1)]
    tamper(run, 1)
    got.append(run.feed(1, ids[-1:]))
    return torch.cat(got), logits_of(kind, ids)


def from_a_snapshot(kind: str, attention: str, tamper: Tamper) -> Result:
    """A second sequence goes on where the first one was, while that one goes on too."""
    run, ids = sequences(kind, attention), text(LONG)
    run.feed(1, ids[:64])
    run.share(1, 2)
    tamper(run, 2)
    run.feed(1, text(7, seed=5))
    got = run.feed(2, ids[64:], chunk=20)
    return got, logits_of(kind, ids)[64:]


def moved_to_another_arena(kind: str, attention: str, tamper: Tamper) -> Result:
    run, ids = sequences(kind, attention), text(LONG)
    run.feed(1, ids[:72], chunk=40)
    other = sequences(kind, attention)
    if run.model.specs:
        other.fill(5, run.payloads(1, 72 // PAGE_TOKENS), ids[:72])
    other.tokens[5] = ids[:72]
    other.take_state(5, 0)
    other.arena.load(other.slots[5], Part.STATE, run.arena.export(run.slots[1], Part.STATE))
    tamper(other, 5)
    return other.feed(5, ids[72:], chunk=11), logits_of(kind, ids)[72:]


def mixed_batch_of_sixteen(kind: str, attention: str, tamper: Tamper) -> Result:
    """One step decodes some sequences, starts some, and goes on with a chunk of the others."""
    run = sequences(kind, attention)
    texts = {number: text(5 + 5 * number, seed=number) for number in range(16)}
    last = {number: (1, 9, 1, 40)[number % 4] for number in range(16)}
    for number, ids in texts.items():
        if len(ids) > last[number]:
            run.feed(number, ids[: -last[number]], chunk=50)
    tamper(run, 14)
    passes = [run.make(n, ids[-last[n] :]) for n, ids in texts.items()]
    output = run.runner.run(Batch(passes))
    want = [
        logits_of(kind, ids)[-len(one.token_ids) :]
        for one, ids in zip(passes, texts.values(), strict=True)
    ]
    assert [len(rows) for rows in output.rows] == [len(rows) for rows in want]
    return output.logits, torch.cat(want)


SCENARIOS: tuple[Scenario, ...] = (
    prefill_then_decode,
    chunked,
    token_by_token,
    from_a_snapshot,
    moved_to_another_arena,
    mixed_batch_of_sixteen,
)


def leave(_run: Sequences, _sequence: int) -> None:
    """Do nothing."""


def swap_state(run: Sequences, sequence: int) -> None:
    run.swap_state(sequence, text(LONG + 30, seed=77))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_logits_are_transformers_own(scenario: Scenario, kind: str) -> None:
    assert_same(kind, *scenario(kind, "auto", leave))


@pytest.mark.parametrize("kind", ["falcon_h1", "bamba"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_logits_are_transformers_own_with_the_fallback(scenario: Scenario, kind: str) -> None:
    assert_same(kind, *scenario(kind, "torch", leave))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_a_swapped_state_shows(scenario: Scenario, kind: str) -> None:
    got, want = scenario(kind, "auto", swap_state)
    with pytest.raises(AssertionError, match="logits are off"):
        assert_same(kind, got, want)


@pytest.mark.parametrize("kind", ["falcon_h1", "qwen3_next", "lfm2", "bamba", "jamba"])
def test_a_swapped_page_shows_in_a_hybrid(kind: str) -> None:
    run, ids = sequences(kind), text(LONG)
    run.feed(1, ids[:64])
    run.swap(1, 3, text(LONG, seed=77))
    with pytest.raises(AssertionError, match="logits are off"):
        assert_same(kind, run.feed(1, ids[64:]), logits_of(kind, ids)[64:])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_the_best_of_transformers(kind: str) -> None:
    run, ids = sequences(kind), text(50)
    got = run.generate(1, run.feed(1, ids, chunk=20), 24)
    assert_same_tokens(got, logits_of(kind, ids + got)[len(ids) - 1 : -1])


@pytest.mark.parametrize("kind", ["mamba2", "mamba", "falcon_h1"])
def test_only_the_rows_asked_for_get_logits(kind: str) -> None:
    run = sequences(kind)
    for number in (1, 2):
        run.feed(number, text(5, number))
    passes = [
        run.make(1, text(4, 3), logits=LogitRows.LAST),
        run.make(2, text(1, 4), logits=LogitRows.NONE),
        run.make(3, text(5, 5), logits=LogitRows.ALL),
    ]
    output = run.runner.run(Batch(passes))
    assert [list(rows) for rows in output.rows] == [[0], [], [1, 2, 3, 4, 5]]
    assert_same(kind, output.of(0), logits_of(kind, text(5, 1) + text(4, 3))[-1:])
    assert_same(kind, output.of(2), logits_of(kind, text(5, 5)))


def test_scores_of_a_stepped_model_are_those_of_its_tokens() -> None:
    run, ids = sequences("jamba"), text(30)
    run.feed(1, ids[:20])
    one = run.make(1, ids[20:])
    scored = Pass(
        1,
        one.token_ids,
        20,
        one.page_ids,
        scores_queries=3,
        state_in=one.state_in,
        state_out=one.state_out,
    )
    with torch.inference_mode():
        theirs = oracle("jamba")(torch.tensor([ids]), output_attentions=True).attentions
    want = torch.stack([layer[0, :, -3:].sum(1) for layer in theirs if layer is not None])
    scores = run.runner.run(Batch([scored])).scores[0]
    assert scores is not None
    assert torch.allclose(scores, want, atol=1e-5)


def test_a_pass_leaves_the_state_that_it_goes_on_from() -> None:
    run = sequences("mamba2")
    run.feed(1, text(20))
    before = bytes(run.arena.export(run.slots[1], Part.STATE))
    slot = run.slots[1]
    run.feed(1, text(9, 1))
    assert bytes(run.arena.export(slot, Part.STATE)) == before
    assert run.slots[1] != slot


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_not_a_number_is_told(kind: str) -> None:
    for which in range(len(served(kind, "auto").states)):
        run = sequences(kind)
        run.feed(1, text(12))
        run.feed(2, text(9))
        run.arena.states[which][run.slots[1]] = torch.nan
        output = run.runner.run(Batch([run.make(1, text(3, 1)), run.make(2, text(1, 2))]))
        assert output.finite == [False, True]


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ([Pass(1, [5], 4, [], state_out=0)], "go on from a state slot"),
        ([Pass(1, [5], 0, [], state_in=1, state_out=0)], "go on from a state slot"),
        ([Pass(1, [5], 0, [])], "no slot for its recurrent states"),
        ([Pass(1, [5], 0, [], state_out=40)], "outside of the arena"),
        ([Pass(1, [5], 4, [], state_in=-1, state_out=0)], "outside of the arena"),
        (
            [Pass(1, [5], 0, [], state_out=3), Pass(2, [5], 0, [], state_out=3)],
            "which another pass uses",
        ),
        (
            [Pass(1, [5], 4, [], state_in=3, state_out=2), Pass(2, [5], 0, [], state_out=3)],
            "which another pass uses",
        ),
    ],
)
def test_a_batch_that_mixes_up_states_is_refused(passes: list[Pass], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        sequences("mamba2").runner.run(Batch(passes))

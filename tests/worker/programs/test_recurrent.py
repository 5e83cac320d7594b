"""Programs on recurrent and hybrid models say what transformers says, without a cache.

What cannot be done to a state, because it has no slots, is refused and changes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, Sampling
from pie.wire.programs import (
    CloseSet,
    CompactSet,
    ParkSet,
    PassDone,
    PassInput,
    Rows,
    RunPass,
    Trouble,
)
from pie.worker.batch import Batch, StepOutput
from tests.support.models import VOCAB_SIZE, tiny_module
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.engine.driver import Answer
from tests.worker.engine.test_models import expect
from tests.worker.engine.test_recurrent_models import served
from tests.worker.programs.lane_driver import Failed, LaneDriver, u32
from tests.worker.programs.test_passes import PAGE, text

GREEDY = Sampling(temperature=0)


def driver_of(kind: str, tokenizer: Tokenizer, **options: int) -> Iterator[LaneDriver]:  # noqa: F811
    one = LaneDriver(served(kind), tokenizer, **options)
    one.open(1)
    yield one
    one.end()
    assert not len(one.ledger)
    assert one.roster.states is not None
    assert not len(one.roster.states)
    assert not one.lot.used_bytes
    one.engine.check()


EVERY = pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "lfm2", "jamba"], indirect=True)


@pytest.fixture(params=["mamba2", "falcon_h1"])
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def driver(kind: str, tokenizer: Tokenizer) -> Iterator[LaneDriver]:  # noqa: F811
    yield from driver_of(kind, tokenizer)


def oracle(kind: str, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = tiny_module(kind)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def off(got: NDArray[np.float32] | None, want: torch.Tensor) -> float:
    assert got is not None
    return float((torch.from_numpy(got.copy()) - want).abs().max() / want.abs().max())


def slots(driver: LaneDriver) -> int:
    assert driver.roster.states is not None
    return len(driver.roster.states)


@EVERY
@pytest.mark.parametrize("seed", range(2))
def test_passes_of_any_length(driver: LaneDriver, kind: str, seed: int) -> None:
    draw, ids = random.Random(seed), text(110, seed)
    got, done = [], 0
    while done < len(ids):
        count = min(draw.choice([1, 2, 5, 13, 40]), len(ids) - done)
        got.append(driver.feed(1, ids[done : done + count], logits=Rows.ALL).logits)
        done += count
    whole = np.concatenate([one for one in got if one is not None])
    assert off(whole, oracle(kind, ids)) < 1e-4


@EVERY
def test_generating_and_going_on(driver: LaneDriver, kind: str) -> None:
    prompt = text(43)
    for more in (text(9, seed=1), []):
        drawn = driver.go_on(1, prompt[-9 if not more else 0 :], max_tokens=12, sampling=GREEDY)
        tokens = [token for one in drawn for token in one.tokens]
        answer = Answer(tokens, finish_reason=FinishReason(drawn[-1].finish))
        expect(tiny_module(kind), prompt, answer)
        # The last token drawn is not run.
        prompt = [*prompt, *tokens[:-1], *more]


def test_the_next_set_and_requests_go_on_from_what_a_set_left(
    driver: LaneDriver, kind: str
) -> None:
    ids = text(100)
    driver.feed(1, ids)
    driver.open(2)
    gave = driver.feed(2, ids, logits=Rows.LAST)
    assert gave.part.cached_tokens == 96
    assert off(gave.logits, oracle(kind, ids)[-1:]) < 1e-4
    assert driver.generate(ids, 1).cached.device == 96
    other = text(75, seed=3)
    driver.generate(other, 1)
    driver.open(3)
    assert driver.feed(3, [*other, 5], logits=Rows.LAST).part.cached_tokens == 72


def test_a_snapshot_that_is_exchanged_shows(driver: LaneDriver, kind: str) -> None:
    ids = text(100)
    driver.feed(1, ids)
    for state in driver.arena.states:
        state.copy_(state.flip(-1) + 0.5)
    driver.open(2)
    gave = driver.feed(2, ids, logits=Rows.LAST)
    assert gave.part.cached_tokens == 96
    assert off(gave.logits, oracle(kind, ids)[-1:]) > 1e-3


@pytest.mark.parametrize("length", [37, 32])
def test_forks_go_their_own_ways(driver: LaneDriver, kind: str, length: int) -> None:
    ids = text(length)
    driver.feed(1, ids)
    before, pages = slots(driver), len(driver.ledger)
    driver.fork(1, *range(2, 6))
    # At the end of a page there is a snapshot, which all share; else each has a copy.
    assert slots(driver) - before == (4 if length % PAGE else 0)
    paged = driver.ledger.is_paged
    assert len(driver.ledger) - pages == (4 if length % PAGE and paged else 0)
    ways = {at: text(21, seed=at) for at in range(1, 6)}
    for part in (slice(0, 6), slice(6, 21)):
        for at in ways:
            gave = driver.feed(at, ways[at][part], logits=Rows.LAST)
            want = oracle(kind, [*ids, *ways[at][: part.stop]])
            assert off(gave.logits, want[-1:]) < 1e-4
    for at in range(2, 6):
        driver.call(CloseSet(driver.number(), at))


def test_a_sealed_set_goes_on_and_its_forks_share_all_pages(driver: LaneDriver, kind: str) -> None:
    ids, after = text(37), text(30, seed=1)
    driver.feed(1, ids)
    driver.seal(1)
    pages = len(driver.ledger)
    driver.fork(1, 2)
    assert len(driver.ledger) == pages
    for at in (1, 2):
        gave = driver.feed(at, after, logits=Rows.ALL)
        assert off(gave.logits, oracle(kind, [*ids, *after])[len(ids) :]) < 1e-4


def test_likelihoods(driver: LaneDriver, kind: str) -> None:
    ids = text(60)
    gave = driver.feed(1, ids[:-1], targets=ids[20:])
    want = oracle(kind, ids).log_softmax(-1)
    expected = [float(want[at - 1, ids[at]]) for at in range(20, 60)]
    assert gave.targets is not None
    assert np.allclose(gave.targets, expected, atol=2e-3)


@EVERY
def test_embeddings_say_what_their_tokens_say(driver: LaneDriver, kind: str) -> None:
    ids = text(20)
    driver.feed(1, ids[:7])
    weight = served(kind).module.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    rows = weight.detach().float()[ids[7:]].numpy()
    one = PassInput(1, has_embeddings=True, logits=Rows.LAST)
    frames = [u32([0] * 13), rows.astype("<f4").tobytes()]
    found, given = driver.answer(driver.call(RunPass(driver.number(), (one,)), frames))
    assert isinstance(found, PassDone), found
    logits = np.frombuffer(bytes(given[0]), "<f4").reshape(1, VOCAB_SIZE)
    assert off(logits, oracle(kind, ids)[-1:]) < 1e-4


def test_a_parked_set_goes_on_as_it_was(driver: LaneDriver, kind: str) -> None:
    ids = text(75)
    driver.feed(1, ids[:37])
    assert driver.state(ParkSet(driver.number(), 1)).pages == 0
    assert not slots(driver)
    for number in range(90, 98):
        driver.open(number)
        driver.feed(number, text(40, seed=number))
        driver.call(CloseSet(driver.number(), number))
    for state in driver.arena.states:
        state.fill_(0.25)
    gave = driver.feed(1, ids[37:], logits=Rows.ALL)
    assert off(gave.logits, oracle(kind, ids)[37:]) < 1e-4


def test_what_has_no_slots_is_refused_and_nothing_has_changed(
    driver: LaneDriver, kind: str
) -> None:
    ids = text(30)
    driver.feed(1, ids[:20])
    mask = np.ones((4, 24), np.bool_)
    for attempt in (
        lambda: driver.feed(1, ids[20:24], mask=mask),
        lambda: driver.feed(1, ids[20:24], read=[0, 1]),
        lambda: driver.feed(1, ids[20:24], write=18),
        lambda: driver.drop(1, [3]),
        lambda: driver.state(CompactSet(driver.number(), 1)),
    ):
        with pytest.raises(Failed, match="recurrent layers, which have no slots") as failed:
            attempt()
        assert failed.value.told.trouble is Trouble.RECURRENT
    if driver.ledger.is_paged:
        gave = driver.feed(1, ids[20:24], scores=4)
        assert gave.scores is not None
        assert np.allclose(gave.scores.sum(-1), 1, atol=1e-5)
    else:
        with pytest.raises(Failed, match="no attention to give scores of"):
            driver.feed(1, ids[20:24], scores=1)
        driver.feed(1, ids[20:24])
    gave = driver.feed(1, ids[24:], logits=Rows.LAST)
    assert off(gave.logits, oracle(kind, ids)[-1:]) < 1e-4


def test_who_finds_no_state_waits_and_then_fails_by_name(tokenizer: Tokenizer) -> None:  # noqa: F811
    for driver in driver_of("mamba2", tokenizer, state_cap=2):
        driver.feed(1, text(20))
        driver.open(2)
        driver.feed(2, text(20, seed=1))
        driver.open(3)
        call = driver.start(3, [5, 6])
        driver.step()
        driver.now_s += 10
        told, _ = driver.answer(call)
        assert told.trouble is Trouble.OUT_OF_PAGES
        assert "programs hold 2 of at most 2" in told.message
        with pytest.raises(Failed, match="no recurrent state can be had"):
            driver.fork(1, 7)
        driver.call(CloseSet(driver.number(), 2))
        assert driver.feed(3, [5, 6]).part.length == 2
        assert driver.held(1).next_slot == 20


def test_a_state_that_a_failed_pass_wrote_is_not_gone_on_from(
    driver: LaneDriver, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = text(50)
    driver.feed(1, ids[:21])
    driver.fork(1, 2)
    asked = driver.submit(text(30, seed=4), 4)
    run = driver.engine._runner.run

    def breaks(batch: Batch) -> StepOutput:
        run(batch)
        raise RuntimeError("after all was written")

    monkeypatch.setattr(driver.engine._runner, "run", breaks)
    with pytest.raises(Failed, match="after all was written"):
        driver.feed(1, ids[21:30])
    monkeypatch.undo()
    assert asked.error is not None
    for attempt in (lambda: driver.feed(1, ids[21:]), lambda: driver.fork(1, 3)):
        with pytest.raises(Failed, match="was lost with a pass that failed"):
            attempt()
    driver.engine.check()
    gave = driver.feed(2, ids[21:], logits=Rows.LAST)
    assert off(gave.logits, oracle(kind, ids)[-1:]) < 1e-4
    # From a snapshot nothing is lost: the pass reads it and writes elsewhere.
    driver.open(4)
    ids = text(50, seed=9)
    driver.feed(4, ids[:32])
    driver.fork(4, 5)
    monkeypatch.setattr(driver.engine._runner, "run", breaks)
    with pytest.raises(Failed, match="after all was written"):
        driver.feed(5, ids[32:40])
    monkeypatch.undo()
    gave = driver.feed(5, ids[32:], logits=Rows.LAST)
    assert off(gave.logits, oracle(kind, ids)[-1:]) < 1e-4


def test_programs_and_requests_share_steps_and_slots(driver: LaneDriver, kind: str) -> None:
    prompts = [text(60, seed=at) for at in range(4)]
    answers = [driver.submit(prompt, 8) for prompt in prompts[:2]]
    for number, prompt in enumerate(prompts[2:], start=5):
        driver.open(number)
        driver.start(number, prompt)
    driver.run()
    for prompt, answer in zip(prompts, answers, strict=False):
        expect(tiny_module(kind), prompt, answer)
    for number, prompt in enumerate(prompts[2:], start=5):
        gave = driver.feed(number, [9], logits=Rows.LAST)
        assert off(gave.logits, oracle(kind, [*prompt, 9])[-1:]) < 1e-4

"""Passes of programs through the engine, against a model in float64 that sees everything at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import Sampling
from pie.wire.programs import GenerateTokens, Rows, Trouble
from pie.worker.programs.run import Run
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.programs.lane_driver import Failed, LaneDriver, u32
from tests.worker.programs.masked_reference import masked

PAGE = 8
GREEDY = Sampling(temperature=0)


@pytest.fixture
def driver(tokenizer: Tokenizer) -> Iterator[LaneDriver]:  # noqa: F811
    yield from _driver("llama", tokenizer)


def _driver(kind: str, tokenizer: Tokenizer, **options: object) -> Iterator[LaneDriver]:  # noqa: F811
    one = LaneDriver(tiny_model(kind, page_tokens=PAGE), tokenizer, **options)  # type: ignore[arg-type]
    one.open(1)
    yield one
    one.end()
    assert not len(one.ledger)
    one.engine.check()


def text(tokens: int, seed: int = 0) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(3, VOCAB_SIZE) for at in range(tokens)]


def causal(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def same(got: NDArray[np.float32] | None, want: torch.Tensor, tolerance: float = 2e-5) -> None:
    assert got is not None
    error = float((torch.from_numpy(got.copy()).double() - want).abs().max() / want.abs().max())
    assert error <= tolerance, f"off by {error:.1e} of the largest"


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "mistral"])
def test_without_a_mask_a_pass_is_the_models_own(kind: str, tokenizer: Tokenizer) -> None:  # noqa: F811
    for driver in _driver(kind, tokenizer):
        ids = text(90)
        gave = driver.feed(1, ids, logits=Rows.ALL)
        from tests.worker.model.test_equality import logits_of, oracle  # noqa: PLC0415

        same(gave.logits, logits_of(oracle(kind), ids).double(), 1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_dropped_slots_are_seen_by_no_later_pass(driver: LaneDriver, seed: int) -> None:
    draw = random.Random(seed)
    ids, allowed = text(96, seed), causal(96)
    done, gone = 0, set[int]()
    got = []
    while done < len(ids):
        count = min(draw.choice([1, 2, 5, 13, 30]), len(ids) - done)
        gave = driver.feed(1, ids[done : done + count], logits=Rows.ALL)
        got.append(gave.logits)
        allowed[done : done + count, sorted(gone)] = False
        done += count
        live = [slot for slot in range(done) if slot not in gone]
        more = draw.sample(live, k=min(len(live) - 1, draw.choice([0, 1, 6, 20])))
        gone.update(more)
        state = driver.drop(1, more)
        if draw.random() < 0.4:
            state = driver.compact(1)
            assert state.pages == -(-(done - len(gone)) // PAGE)
        assert not more or not driver.held(1).is_pure or not gone
    want, _ = masked("llama", ids, allowed)
    same(np.concatenate([one for one in got if one is not None]), want)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_a_sliding_window_counts_positions_after_slots_were_gathered(
    kind: str,
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    for driver in _driver(kind, tokenizer):
        ids, gone = text(80), list(range(10, 50))
        first = driver.feed(1, ids[:60], logits=Rows.ALL)
        driver.drop(1, gone)
        driver.compact(1)
        second = driver.feed(1, ids[60:], logits=Rows.ALL)
        windows = [spec.window for spec in tiny_model(kind).specs]
        behind = torch.arange(80)[:, None] - torch.arange(80)[None]
        allowed = torch.stack([behind < (window or 1000) for window in windows])[:, None]
        allowed = allowed.clone()
        allowed[:, :, 60:, gone] = False
        want, _ = masked(kind, ids, allowed)
        assert first.logits is not None
        assert second.logits is not None
        same(np.concatenate([first.logits, second.logits]), want)


def test_a_mask_of_its_own_for_each_layer_and_head_is_kept(driver: LaneDriver) -> None:
    ids = text(50)
    random_mask = torch.rand((3, 4, 30, 50), generator=torch.Generator().manual_seed(5)) < 0.5
    random_mask[..., torch.arange(30), torch.arange(20, 50)] = True
    first = driver.feed(1, ids[:20], logits=Rows.ALL)
    second = driver.feed(1, ids[20:], logits=Rows.ALL, mask=random_mask.numpy())
    allowed = causal(50).expand(3, 4, 50, 50).clone()
    allowed[:, :, 20:] &= random_mask
    want, _ = masked("llama", ids, allowed)
    assert first.logits is not None
    assert second.logits is not None
    same(np.concatenate([first.logits, second.logits]), want)


def test_slots_to_read_are_a_mask_that_leaves_the_pass_itself_in(driver: LaneDriver) -> None:
    ids = text(40)
    driver.feed(1, ids[:30])
    gave = driver.feed(1, ids[30:], read=[0, 1, 7, 29], logits=Rows.ALL)
    allowed = causal(40)
    allowed[30:, [slot for slot in range(30) if slot not in {0, 1, 7, 29}]] = False
    want, _ = masked("llama", ids, allowed)
    same(gave.logits, want[30:])


def test_positions_can_be_given(driver: LaneDriver) -> None:
    ids, positions = text(30), [3 * at + 5 for at in range(30)]
    gave = driver.feed(1, ids, positions=positions, logits=Rows.ALL)
    want, _ = masked("llama", ids, causal(30), positions)
    same(gave.logits, want)
    assert driver.held(1).next_position == positions[-1] + 1


@pytest.mark.parametrize("window", [1, 7, 70])
def test_scores_come_with_a_mask_in_the_same_pass_and_sum_to_one(
    driver: LaneDriver, window: int
) -> None:
    ids = text(100)
    driver.feed(1, ids[:30])
    driver.drop(1, [2, 9, 10])
    mask = torch.rand((70, 100), generator=torch.Generator().manual_seed(1)) < 0.7
    mask[torch.arange(70), torch.arange(30, 100)] = True
    gave = driver.feed(1, ids[30:], mask=mask.numpy(), scores=window, logits=Rows.LAST)
    allowed = causal(100)
    allowed[30:] &= mask
    allowed[30:, [2, 9, 10]] = False
    want, attention = masked("llama", ids, allowed)
    same(gave.logits, want[-1:])
    assert gave.scores is not None
    assert np.abs(gave.scores.sum(-1) - 1).max() < 1e-5
    expected = torch.stack([one[:, -window:].mean(1) for one in attention])
    assert float((torch.from_numpy(gave.scores.copy()) - expected).abs().max()) < 1e-5


def test_hidden_states_and_log_probabilities_come_out_of_chunks_whole(driver: LaneDriver) -> None:
    ids = text(150)  # more than a step takes
    gave = driver.feed(1, ids[:-1], targets=ids[1:], hidden=Rows.ALL, top=5, logits=Rows.LAST)
    want, _ = masked("llama", ids, causal(150))
    logs = want[:-1].log_softmax(-1)
    expected = logs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    same(gave.targets, expected)
    assert gave.hidden is not None
    assert gave.hidden.shape == (149, 64)
    head = dict(tiny_model("llama").module.named_parameters())["lm_head.weight"]
    logits = torch.from_numpy(gave.hidden.copy()) @ head.detach().T
    same(logits.numpy(), want[:-1])


def test_a_fork_goes_on_by_itself_and_copies_at_most_the_buffer(driver: LaneDriver) -> None:
    ids = text(44)
    driver.feed(1, ids[:20])
    before = driver.table.counts().free
    driver.fork(1, 2, 3)
    assert before - driver.table.counts().free == 2  # a buffer for each
    other = text(24, seed=9)
    left = driver.feed(2, ids[20:], logits=Rows.ALL)
    right = driver.feed(3, other, logits=Rows.ALL)
    same(left.logits, masked("llama", ids, causal(44))[0][20:])
    same(right.logits, masked("llama", ids[:20] + other, causal(44))[0][20:])


def test_what_a_program_computed_serves_a_request_and_the_other_way_round(
    driver: LaneDriver,
) -> None:
    ids = text(40)
    driver.feed(1, ids)
    answer = driver.generate(ids, 3)
    assert answer.cached.device >= 32
    driver.open(2)
    other = text(40, seed=3)
    driver.generate(other, 3)
    assert driver.feed(2, other).part.cached_tokens >= 32


def test_opaque_pages_serve_nobody_else(driver: LaneDriver) -> None:
    ids = text(40)
    mask = np.tril(np.ones((40, 40), np.bool_))
    mask[20:, 3] = False
    driver.feed(1, ids, mask=mask)
    assert driver.generate(ids, 3).cached.device == 0


def test_the_engine_draws_what_a_request_would_get(driver: LaneDriver) -> None:
    ids = text(30)
    want = driver.generate(ids, 12, ignore_eos=True)
    told = driver.go_on(1, ids, max_tokens=12, sampling=GREEDY, ignore_eos=True)
    assert [token for one in told for token in one.tokens] == want.token_ids
    assert "".join(one.text for one in told) == want.text
    assert told[-1].finish == "length"


def test_a_seeded_draw_is_the_requests_own(driver: LaneDriver) -> None:
    ids, sampling = text(30), Sampling(temperature=1.3, seed=11, top_p=0.9)
    want = driver.generate(ids, 12, sampling=sampling, ignore_eos=True)
    told = driver.go_on(1, ids, max_tokens=12, sampling=sampling, ignore_eos=True)
    assert [token for one in told for token in one.tokens] == want.token_ids


def test_a_drawn_token_can_be_had_pass_by_pass(driver: LaneDriver) -> None:
    ids = text(30)
    want = driver.generate(ids, 5, ignore_eos=True).token_ids
    got, feed = [], ids
    for at in range(5):
        token = driver.feed(1, feed, sampling=GREEDY, draw=at).part.token
        assert token is not None
        got.append(token)
        feed = [token]
    assert got == want


def test_calls_on_one_set_are_carried_out_in_order_without_waiting(driver: LaneDriver) -> None:
    ids = text(60)
    first = driver.start(1, ids[:50], logits=Rows.ALL)
    second = driver.start(1, ids[50:], logits=Rows.ALL)
    driver.run()
    want, _ = masked("llama", ids, causal(60))
    same(driver.gave(first).logits, want[:50])
    same(driver.gave(second).logits, want[50:])


def test_a_slot_that_was_never_written_cannot_be_read(driver: LaneDriver) -> None:
    driver.feed(1, text(10))
    with pytest.raises(Failed, match="slot 10 was never written") as raised:
        driver.feed(1, [5], read=[3, 10])
    assert (raised.value.told.trouble, raised.value.told.slot) == (Trouble.NEVER_WRITTEN, 10)


def test_a_dropped_slot_cannot_be_read(driver: LaneDriver) -> None:
    driver.feed(1, text(10))
    driver.drop(1, [4])
    with pytest.raises(Failed, match="slot 4 was dropped") as raised:
        driver.feed(1, [5], read=[3, 4])
    assert raised.value.told.trouble is Trouble.DROPPED


def test_a_frozen_page_cannot_be_written(driver: LaneDriver) -> None:
    driver.feed(1, text(20))
    with pytest.raises(Failed, match="slot 12 lies in a frozen page") as raised:
        driver.feed(1, [5], write=12)
    assert (raised.value.told.trouble, raised.value.told.slot) == (Trouble.FROZEN_PAGE, 12)
    ids = text(20)
    gave = driver.feed(1, [7, 8], write=18, logits=Rows.ALL)
    want, _ = masked("llama", [*ids[:18], 7, 8], causal(20))
    same(gave.logits, want[18:])


def test_a_token_that_would_attend_to_nothing_is_refused_by_its_slot(driver: LaneDriver) -> None:
    driver.feed(1, text(10))
    mask = np.ones((3, 13), np.bool_)
    mask[1] = False
    with pytest.raises(Failed, match="slot 11 would attend to nothing") as raised:
        driver.feed(1, text(3), mask=mask)
    assert (raised.value.told.trouble, raised.value.told.slot) == (Trouble.NOTHING_ATTENDED, 11)
    mask[1, 12] = True  # later than itself
    with pytest.raises(Failed, match="slot 11 would attend to nothing"):
        driver.feed(1, text(3), mask=mask)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=-1),
        Sampling(temperature=float("nan")),
        Sampling(top_p=0),
        Sampling(min_p=2),
        Sampling(logit_bias={5: float("inf")}),
    ],
)
def test_a_draw_that_cannot_be_made_is_refused_and_the_engine_goes_on(
    driver: LaneDriver, sampling: Sampling
) -> None:
    with pytest.raises(Failed) as raised:
        driver.feed(1, text(4), sampling=sampling)
    assert raised.value.told.trouble is Trouble.BAD_CALL
    message = GenerateTokens(driver.number(), 1, 5, sampling)
    told, _ = driver.answer(driver.call(message, [u32(text(4))]))
    assert told.trouble is Trouble.BAD_CALL
    assert driver.generate(text(10), 2).token_ids


@pytest.mark.parametrize("place", ["make_pass", "take", "check"])
def test_a_bug_in_a_programs_pass_ends_that_call_alone(
    driver: LaneDriver, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patched:
        patched.setattr(Run, place, broken)
        call = driver.start(1, text(4))
        answer = driver.submit(text(20, seed=8), 3)
        told, _ = driver.answer(call)
    assert told.trouble is Trouble.FAILED
    assert answer.token_ids
    assert driver.feed(1, text(4)).part.length == 4


def test_no_more_calls_wait_on_one_set_than_may(driver: LaneDriver) -> None:
    calls = [driver.start(1, [5]) for _ in range(5000)]
    told, _ = driver.told[calls[-1]][-1] if driver.step() else (None, None)
    assert told is not None
    assert told.trouble is Trouble.BAD_CALL
    driver.end()
    driver.begin("p")
    driver.open(1)


def test_a_call_that_fails_changes_nothing(driver: LaneDriver) -> None:
    ids = text(30)
    driver.feed(1, ids[:14])
    for bad in (
        {"read": [99]},
        {"mask": np.zeros((4, 18), np.bool_)},
        {"write": 2},
        {"write": -1},
        {"positions": [1 << 20] * 4},
        {"write": 12, "read": [99]},
    ):
        with pytest.raises(Failed):
            driver.feed(1, ids[14:18], **bad)
    gave = driver.feed(1, ids[14:], logits=Rows.ALL)
    same(gave.logits, masked("llama", ids, causal(30))[0][14:])


def test_a_set_that_is_not_there_is_named(driver: LaneDriver) -> None:
    with pytest.raises(Failed, match="there is no working set 7"):
        driver.feed(7, text(3))


def test_a_program_that_ends_in_the_middle_leaves_nothing(driver: LaneDriver) -> None:
    driver.begin("q")
    driver.open(1, program="q")
    driver.start(1, text(150, seed=4), program="q")
    driver.step()
    assert len(driver.ledger)
    driver.end("q")
    assert not len(driver.ledger)
    driver.run()


def test_when_there_is_no_room_a_pass_waits_and_then_fails_by_name(tokenizer: Tokenizer) -> None:  # noqa: F811
    for driver in _driver("llama", tokenizer, pages=16, share=0.25):
        driver.feed(1, text(30))
        driver.open(2)
        call = driver.start(2, text(20, seed=2))
        driver.step()
        driver.now_s += 20.0
        driver.step()
        told, _ = driver.answer(call)
        assert told.trouble is Trouble.OUT_OF_PAGES
        assert "of at most 4 pages" in told.message


def test_a_program_of_many_forks_does_not_starve_a_request(driver: LaneDriver) -> None:
    driver.feed(1, text(16))
    driver.fork(1, *range(2, 14))
    calls = [driver.start(one, text(40, seed=one)) for one in range(2, 8)]
    answer = driver.submit(text(64, seed=77), 6, ignore_eos=True)
    steps = 0
    while answer.finish_reason is None:
        driver.step()
        steps += 1
    assert steps <= 64 // 8 + 6 + 2
    driver.run()
    assert all(call in driver.told for call in calls)


def test_two_programs_share_what_a_step_has_left(driver: LaneDriver) -> None:
    driver.begin("q")
    driver.open(1, program="q")
    long = driver.start(1, text(400, seed=5))
    short = driver.start(1, text(40, seed=6), program="q")
    for _ in range(4):
        driver.step()
    assert short in driver.told
    assert long not in driver.told
    driver.run()
    driver.end("q")

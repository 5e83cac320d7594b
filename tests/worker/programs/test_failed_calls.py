"""Calls that fail while others wait behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import Sampling
from pie.wire.programs import (
    CancelCall,
    CloseSet,
    GenerateTokens,
    PassDone,
    PassInput,
    Rows,
    RunPass,
    Trouble,
)
from pie.worker.batch import Batch, StepOutput
from tests.support.models import tiny_model
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.programs.lane_driver import LaneDriver, u32
from tests.worker.programs.test_bounds import text

PAGE = 8


def made(
    tokenizer: Tokenizer,  # noqa: F811
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> LaneDriver:
    driver = LaneDriver(tiny_model("llama", page_tokens=PAGE, dtype=dtype), tokenizer, **options)
    for number in (1, 2, 3):
        driver.open(number)
    return driver


def wait_for(driver: LaneDriver, call: int) -> None:
    for _ in range(100):
        if call in driver.told:
            return
        driver.step()
        driver.now_s += 1
    raise AssertionError("never answered")


def test_no_page_is_named_for_tokens_that_a_failed_call_was_to_run(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    driver = made(tokenizer, dtype=torch.bfloat16, step_tokens=128)
    before, lost, x, tail = text(8, 1), text(8, 2), text(8, 7), text(9, 9)
    driver.feed(3, [*before, *x, 5])
    driver.feed(2, before)
    hidden = driver.roster._shape.hidden_size
    large = np.full((2, hidden), 3.4e38, np.float32)
    inputs = (PassInput(1, has_embeddings=True), PassInput(2))
    # One sequence of the call comes out as no numbers; a call on the other waits behind it.
    fails = driver.call(RunPass(driver.number(), inputs), [u32([0, 0]), large.tobytes(), u32(lost)])
    behind = driver.call(RunPass(driver.number(), (PassInput(2),)), [u32(x + tail)])
    driver.run()
    assert driver.told[fails][-1][0].trouble is Trouble.FAILED
    assert isinstance(driver.told[behind][-1][0], PassDone)
    whole = [*before, *x, *tail[:8], *text(3, 11)]
    clean = made(tokenizer, dtype=torch.bfloat16, step_tokens=128)
    found = driver.feed(1, whole, logits=Rows.LAST)
    assert found.part.cached_tokens == 24
    want = clean.feed(1, whole, logits=Rows.LAST)
    assert found.logits is not None
    assert want.logits is not None
    assert np.abs(found.logits - want.logits).max() <= 0.05 * np.abs(want.logits).max()
    assert driver.generate(whole, 6).token_ids == clean.generate(whole, 6).token_ids


def test_sets_that_are_closed_behind_a_call_without_room_hold_nothing(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    driver = made(tokenizer, pages=16, share=0.25)
    driver.feed(3, text(15))
    driver.feed(1, text(8, 1))
    driver.feed(2, text(8, 2))
    call = driver.call(RunPass(driver.number(), (PassInput(1), PassInput(2))), [u32([4]), u32([5])])
    for number in (1, 2):
        driver.call(CloseSet(driver.number(), number))
    wait_for(driver, call)
    assert driver.told[call][-1][0].trouble is Trouble.OUT_OF_PAGES
    driver.run()
    assert len(driver.ledger) == 2


def test_a_generation_that_is_cancelled_before_its_turn_draws_nothing(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    driver = made(tokenizer)

    def generation(number: int) -> GenerateTokens:
        sampling = Sampling(temperature=0)
        return GenerateTokens(driver.number(), number, 20, sampling, ignore_eos=True)

    first, second = generation(1), generation(1)
    driver.call(first, [u32(text(5))])
    driver.call(second, [u32(text(5))])
    driver.call(CancelCall(driver.number(), second.call))
    driver.run()
    ((told, _),) = driver.told[second.call]
    assert (told.tokens, told.finish) == ((), "cancelled")
    assert told.length == driver.told[first.call][-1][0].length == 24


def test_a_pass_that_ran_out_of_pages_amid_leaves_its_set_as_it_was(
    tokenizer: Tokenizer,  # noqa: F811
) -> None:
    driver = made(tokenizer, pages=24, share=0.5, step_tokens=16)
    first, second = text(11), text(9, 4)
    driver.feed(1, first)
    call = driver.start(1, text(120, 3))
    wait_for(driver, call)
    assert driver.told[call][-1][0].trouble is Trouble.OUT_OF_PAGES
    one = driver.roster.programs["p"].sets[1]
    assert (one.next_slot, one.is_pure, len(one.pages)) == (11, True, 2)
    gave = driver.feed(1, second, logits=Rows.LAST)
    want = made(tokenizer).feed(1, first + second, logits=Rows.LAST)
    assert gave.logits is not None
    assert want.logits is not None
    assert np.abs(gave.logits - want.logits).max() <= 1e-5 * np.abs(want.logits).max()
    assert gave.part.first_slot == 11


def test_slots_that_a_failed_pass_wrote_again_hold_what_they_did(
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = made(tokenizer)
    first = text(13)
    driver.feed(1, first)
    run = driver.engine._runner.run

    def breaks(batch: Batch) -> StepOutput:
        run(batch)
        raise RuntimeError("after all was written")

    monkeypatch.setattr(driver.engine._runner, "run", breaks)
    call = driver.start(1, text(2, 5), write=9)
    assert driver.answer(call)[0].trouble is Trouble.FAILED
    monkeypatch.undo()
    gave = driver.feed(1, text(4, 6), logits=Rows.LAST)
    want = made(tokenizer).feed(1, first + text(4, 6), logits=Rows.LAST)
    assert gave.logits is not None
    assert want.logits is not None
    assert np.abs(gave.logits - want.logits).max() <= 1e-5 * np.abs(want.logits).max()
    assert len(driver.ledger) == 3

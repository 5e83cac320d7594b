from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from pie.page.key import PageKey
from pie.tokens.tokenizer import Tokenizer
from pie.wire.messages import FinishReason, RefusalCode
from pie.worker.commands import CancelAll
from tests.worker.engine.driver import Driver
from tests.worker.engine.toys import ToyRunner, toy_answer

PAGE = 4

Make = Callable[..., tuple[Driver, ToyRunner]]


@pytest.fixture
def make(tokenizer: Tokenizer) -> Make:
    def make(pages: int = 64, **options: Any) -> tuple[Driver, ToyRunner]:
        runner = ToyRunner(pages, PAGE)
        driver = Driver(
            runner, tokenizer, pages=pages, page_tokens=PAGE, **({"eos": 999} | options)
        )
        return driver, runner

    return make


def test_the_answer_is_the_models(make: Make) -> None:
    driver, _ = make()
    answer = driver.generate(range(3, 25), 10)
    assert answer.token_ids == toy_answer(range(3, 25), 10)
    assert answer.finish_reason is FinishReason.LENGTH
    assert answer.cached.total == 0


def test_a_second_request_reuses_the_firsts_pages(make: Make) -> None:
    driver, runner = make()
    driver.generate(range(3, 25), 1)
    runner.batches.clear()
    answer = driver.generate([*range(3, 19), 70, 71], 5)
    assert answer.token_ids == toy_answer([*range(3, 19), 70, 71], 5)
    assert answer.cached.device == 16
    assert runner.batches[0].tokens == 2


def test_an_answers_own_pages_are_reused_by_the_next_turn(make: Make) -> None:
    driver, _ = make()
    prompt = list(range(3, 25))
    first = driver.generate(prompt, 10)
    following = [*prompt, *first.token_ids, 9, 9]
    second = driver.generate(following, 3)
    assert second.token_ids == toy_answer(following, 3)
    # The last drawn token was never run, so its state is not there.
    assert second.cached.device == (len(prompt) + 9) // PAGE * PAGE


def test_a_fully_cached_prompt_writes_nothing(make: Make) -> None:
    driver, runner = make()
    driver.generate(range(16), 1)
    before = runner.memory.copy()
    runner.batches.clear()
    answer = driver.generate(range(16), 1)
    assert answer.token_ids == toy_answer(range(16), 1)
    assert answer.cached.device == 15
    (batch,) = runner.batches
    assert not batch.passes[0].write
    assert (runner.memory == before).all()


def test_a_swapped_page_changes_the_answer(make: Make) -> None:
    driver, runner = make()
    driver.generate(range(16), 1)
    page = driver.table._by_key[next(iter(driver.table._by_key))]
    runner.memory[page] = runner.memory[page][::-1].copy()
    assert driver.generate(range(16), 4).token_ids != toy_answer(range(16), 4)


def test_a_mixed_crowd_gets_what_each_would_get_alone(make: Make) -> None:
    driver, runner = make(pages=40, step_tokens=24, max_running=8)
    chance = random.Random(1)
    asked = []
    for _ in range(60):
        prompt = [chance.randrange(3)] * chance.randrange(20) + [
            chance.randrange(50) for _ in range(chance.randrange(1, 20))
        ]
        count = chance.randrange(1, 30)
        asked.append((prompt, count, driver.submit(prompt, count)))
        for _ in range(chance.randrange(4)):
            driver.step()
    driver.run()
    for prompt, count, answer in asked:
        assert answer.token_ids == toy_answer(prompt, count)
        assert answer.deltas == count
    assert driver.engine.status.preemptions
    assert max(batch.tokens for batch in runner.batches) <= 24


def test_cancelling_frees_at_once(make: Make) -> None:
    driver, _ = make()
    answer = driver.submit(range(20), 100)
    other = driver.submit(range(50, 60), 5)
    for _ in range(3):
        driver.step()
    driver.cancel(answer)
    told = answer.deltas
    driver.run()
    assert answer.deltas == told
    assert answer.finish_reason is None
    assert other.token_ids == toy_answer(range(50, 60), 5)
    status = driver.engine.status
    assert (status.pages_writable, status.pages_in_use, status.cancelled) == (0, 0, 1)


def test_all_requests_of_a_router_that_is_gone_are_cancelled(make: Make) -> None:
    driver, _ = make()
    driver.submit(range(20), 100, owner=b"gone")
    driver.submit(range(20), 100, owner=b"gone", request_id="second")
    other = driver.submit(range(9), 4)
    driver.step()
    driver.engine.handle(CancelAll(b"gone"))
    driver.run()
    assert driver.engine.status.cancelled == 2
    assert other.token_ids == toy_answer(range(9), 4)


def test_a_step_that_raises_fails_its_requests_and_no_others(make: Make) -> None:
    driver, runner = make(max_running=1)
    first, second = driver.submit(range(9), 4), driver.submit(range(20, 29), 4)
    runner.error = RuntimeError("no memory")
    driver.step()
    runner.error = None
    driver.run()
    assert first.finish_reason is FinishReason.FAILED
    assert first.error is not None
    assert "no memory" in first.error
    assert second.token_ids == toy_answer(range(20, 29), 4)


def test_pages_of_a_pass_that_raised_are_not_kept(make: Make) -> None:
    driver, runner = make()
    runner.error = RuntimeError()
    driver.generate(range(16), 1)
    runner.error = None
    assert driver.engine.status.pages_free == 64
    assert driver.generate(range(16), 4).cached.total == 0


def test_an_output_that_is_not_a_number_fails_its_request_and_keeps_no_page(make: Make) -> None:
    driver, runner = make(step_tokens=16)
    runner.poison = {99}
    bad = driver.submit([*range(8), 99, *range(30, 60)], 4)
    good = driver.submit(range(20, 29), 4)
    driver.run()
    assert bad.finish_reason is FinishReason.FAILED
    assert bad.error == "the model's output is not a number"
    assert good.token_ids == toy_answer(range(20, 29), 4)
    # The bad one's page before that pass, and those of the good one, which is the shorter.
    assert driver.engine.status.pages_idle == len(driver.changes)
    assert sorted(change.page.index for change in driver.changes) == [0, 0, 1, 2]


def test_a_deadline_ends_a_request(make: Make) -> None:
    driver, _ = make()
    answer = driver.submit(range(9), 200, deadline_s=0.05)
    driver.run()
    assert answer.finish_reason is FinishReason.FAILED
    assert answer.error == "the request's deadline passed"
    assert 0 < len(answer.token_ids) < 200


def test_a_full_queue_refuses_and_says_when_to_come_back(make: Make) -> None:
    driver, _ = make(max_running=1, max_waiting=1)
    driver.submit(range(9), 100)
    driver.step()
    driver.submit(range(9), 1)
    last = driver.submit(range(9), 1)
    driver.step()
    assert last.refused is not None
    assert last.refused.code is RefusalCode.OVERLOADED
    assert last.refused.retry_after_s is not None
    assert last.refused.retry_after_s >= 1


def test_one_id_twice_at_a_time_is_refused(make: Make) -> None:
    driver, _ = make()
    driver.submit(range(9), 3, request_id="same")
    second = driver.submit(range(9), 3, request_id="same")
    driver.step()
    assert second.refused is not None
    assert second.refused.code is RefusalCode.BAD_MESSAGE


def test_a_request_that_cannot_be_begun_is_refused_and_others_go_on(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, _ = make()
    with monkeypatch.context() as broken:
        broken.setattr("pie.worker.engine.Generation", None)
        first = driver.generate(range(9), 3)
    assert first.refused is not None
    assert first.refused.code is RefusalCode.FAILED
    assert driver.generate(range(9), 3).token_ids == toy_answer(range(9), 3)


def test_a_sequence_ends_with_its_context(make: Make) -> None:
    driver, _ = make(pages=4)
    answer = driver.generate(range(10), 100)
    assert len(answer.token_ids) == 6
    assert answer.finish_reason is FinishReason.LENGTH


def test_salts_share_nothing(make: Make) -> None:
    driver, _ = make()
    driver.generate(range(16), 1, salt="a")
    assert driver.generate(range(16), 1, salt="b").cached.total == 0
    assert driver.generate(range(16), 1).cached.total == 0
    assert driver.generate(range(16), 1, salt="a").cached.device == 15


def test_another_engine_goes_on_where_one_stopped(make: Make) -> None:
    prompt = list(range(3, 25))
    whole = make()[0].generate(prompt, 20)
    half = make()[0].generate(prompt, 8)
    rest = make()[0].generate([*prompt, *half.token_ids], 20, output_start=len(prompt))
    assert half.token_ids + rest.token_ids == whole.token_ids
    assert half.text + rest.text == whole.text


def test_a_request_that_comes_complete_ends_at_once(make: Make) -> None:
    driver, _ = make()
    answer = driver.generate(range(12), 4, output_start=8)
    assert answer.token_ids == []
    assert answer.finish_reason is FinishReason.LENGTH


def test_changes_tell_what_the_table_holds(make: Make) -> None:
    driver, _ = make(pages=12)
    for start in range(0, 100, 20):
        driver.generate(range(start, start + 17), 6)
    held: set[PageKey] = set()
    for change in driver.changes:
        (held.add if change.stored else held.remove)(change.page.key)
    assert held == set(driver.table._by_key)


def test_load_says_how_busy_it_is(make: Make) -> None:
    driver, _ = make(max_running=1)
    driver.submit(range(9), 3)
    driver.submit(range(30, 45), 3)
    driver.engine.step()
    report = driver.engine.take_report()
    assert report is not None
    assert (report.load.running, report.load.waiting, report.load.waiting_tokens) == (1, 1, 15)

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pie.tokens.tokenizer import Tokenizer
from tests.worker.engine.threaded import Threaded
from tests.worker.engine.toys import ToyRunner, toy_answer

PAGE = 4


def make(tokenizer: Tokenizer, **options: Any) -> Threaded:
    return Threaded(ToyRunner(64, PAGE), tokenizer, pages=64, page_tokens=PAGE, eos=999, **options)


async def test_answers_and_stops(tokenizer: Tokenizer) -> None:
    engine = make(tokenizer)
    engine.start()
    answers = await asyncio.gather(*(engine.ask(range(start, 30), 9) for start in range(8)))
    for start, answer in enumerate(answers):
        assert answer.token_ids == toy_answer(range(start, 30), 9)
    await engine.stop()


async def test_an_idle_engine_sleeps(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(tokenizer)
    steps = 0
    step = engine.engine.step

    def counted() -> bool:
        nonlocal steps
        steps += 1
        return step()

    monkeypatch.setattr(engine.engine, "step", counted)
    engine.start()
    await engine.ask(range(9), 3)
    await engine.until(lambda: engine.reports[-1].idle)
    before = steps
    await asyncio.sleep(0.3)
    assert steps == before
    assert engine.reports[-1].idle
    await engine.stop()


async def test_reports_count_what_was_submitted(tokenizer: Tokenizer) -> None:
    engine = make(tokenizer)
    engine.start()
    for number in range(3):
        await engine.ask([number], 1)
    await engine.until(lambda: engine.reports[-1].idle)
    assert engine.reports[-1].submitted == 3
    await engine.stop()


async def test_a_bug_in_the_engine_is_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tokenizer)

    def broken() -> bool:
        raise AssertionError("a bug")

    monkeypatch.setattr(engine.engine, "step", broken)
    engine.start()
    engine.submit([1], 1)
    await engine.until(lambda: bool(engine.deaths))
    assert str(engine.deaths[0]) == "a bug"
    assert engine.thread.stop(60.0)


async def test_can_be_stopped_before_it_started(tokenizer: Tokenizer) -> None:
    assert make(tokenizer).thread.stop(1.0)

"""A pass with a mask or a gap never leaves a page, or a snapshot, that anybody finds by its key."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pie.page.key import page_keys
from pie.tokens.tokenizer import Tokenizer
from pie.worker import outcome
from pie.worker.batch import Pass
from pie.worker.generation import Generation
from pie.worker.scheduler import Chunk
from tests.support.models import tiny_model
from tests.worker.engine.test_forks import PAGE, ROOT, World, make
from tests.worker.engine.test_models import Served
from tests.worker.engine.toys import ToyRunner, toy_answer

MASK = torch.ones((3, 3), dtype=torch.bool)


@pytest.mark.parametrize(
    ("one", "is_pure"),
    [
        (Pass(0, [5, 6, 7], 0, [0]), True),
        (Pass(0, [5, 6, 7], 4, [0, 1], positions=[4, 5, 6]), True),
        (Pass(0, [5, 6, 7], 0, [0], scores_queries=1), True),
        (Pass(0, [5, 6, 7], 0, [0], mask=MASK), False),
        (Pass(0, [5, 6, 7], 4, [0, 1], positions=[5, 6, 7]), False),
        (Pass(0, [5, 6, 7], 4, [0, 1], positions=[4, 5, 7]), False),
    ],
)
def test_a_mask_or_other_positions_make_a_pass_impure(one: Pass, is_pure: bool) -> None:
    assert one.is_pure is is_pure


def test_the_page_of_an_impure_pass_and_all_after_it_have_no_key() -> None:
    world = World(20)
    one = world.begin(list(range(2 * PAGE + 1)))
    world.compute(one)
    one.append(50)
    assert one.grow(len(one.tokens), 0.0)
    assert one.advance(1, 0.0, is_pure=False) == []
    for token in range(60, 60 + 3 * PAGE):
        one.append(token)
        assert one.grow(len(one.tokens), 0.0)
        assert one.advance(1, 0.0) == []
    keys = page_keys(ROOT, one.tokens, PAGE)
    assert [world.table.has(key) for key in keys] == [True] * 2 + [False] * 3
    assert world.table.counts().opaque == 3


def test_forks_share_opaque_pages_and_the_last_one_frees_them() -> None:
    world = World(20)
    one = world.begin(list(range(2 * PAGE)))
    assert one.grow(len(one.tokens), 0.0)
    one.advance(2 * PAGE, 0.0, is_pure=False)
    world.contents[one.pages[0]], world.contents[one.pages[1]] = [0, 1, 2, 3], [4, 5, 6, 7]
    fork = world.fork(one)
    assert fork is not None
    assert (fork.pages, world.copies) == (one.pages, 0)
    world.release(one)
    world.check()
    assert world.table.counts().opaque == 2
    world.release(fork)
    assert world.table.counts().free == 20


@given(st.data())
@settings(max_examples=100)
def test_only_what_was_computed_purely_is_ever_found(data: st.DataObject) -> None:
    world = World(pages=24)
    pure: set[bytes] = set()
    is_pure = dict[int, bool]()
    for _ in range(data.draw(st.integers(1, 40))):
        if len(world.sets) < 3 or data.draw(st.booleans()):
            one = world.begin(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6)))
            is_pure[id(one)] = True
            one.match(0.0)
        else:
            one = data.draw(st.sampled_from(world.sets))
            if data.draw(st.integers(0, 4)) == 0:
                world.release(one)
                continue
            if one.missing == 0:
                one.append(data.draw(st.integers(0, 1)))
        if not one.grow(len(one.tokens), 0.0):
            world.release(one)
            continue
        is_pure[id(one)] &= data.draw(st.integers(0, 3)) > 0
        before = one.frozen
        one.advance(one.missing, 0.0, is_pure=is_pure[id(one)])
        if is_pure[id(one)]:
            pure.update(page_keys(ROOT, one.tokens, PAGE)[before:])
        world.table.check([each.pages for each in world.sets])
        assert set(world.table._by_key) <= pure


def test_what_an_engine_computed_with_a_mask_is_nobodys_prefix(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(tokenizer)
    runner = driver.engine._runner
    assert isinstance(runner, ToyRunner)
    plain = outcome._pass

    def masked(chunk: Chunk, generation: Generation) -> Pass:
        one = plain(chunk, generation)
        mask = torch.ones((len(one.token_ids), one.end), dtype=torch.bool)
        return dataclasses.replace(one, mask=mask)

    prompt = list(range(3, 25))
    with monkeypatch.context() as patch:
        patch.setattr(outcome, "_pass", masked)
        driver.generate(prompt, 9)
    assert not driver.changes
    assert driver.table.counts().free == driver.table.total
    answer = driver.generate(prompt, 9)
    assert (answer.cached.total, answer.token_ids) == (0, toy_answer(prompt, 9))


def test_nor_is_a_recurrent_models_snapshot(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Served(tiny_model("mamba2", page_tokens=8), tokenizer, 0, slots=8)
    plain = outcome._pass

    def gapped(chunk: Chunk, generation: Generation) -> Pass:
        one = plain(chunk, generation)
        return dataclasses.replace(one, positions=[at + 1 for at in range(one.start, one.end)])

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "_pass", gapped)
        driver.generate(range(5, 80), 4)
    assert not driver.changes
    driver.generate(range(5, 80), 4)
    assert driver.changes

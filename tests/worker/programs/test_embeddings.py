"""Passes that bring embeddings, against transformers' own model given the same ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pie.tokens.tokenizer import Tokenizer
from pie.wire.programs import PassInput, Rows, RunPass, Trouble
from tests.support.models import tiny_model
from tests.worker.engine.conftest import one_thread, tokenizer, tokenizer_folder  # noqa: F401
from tests.worker.model.test_equality import oracle
from tests.worker.programs.lane_driver import Failed, Gave, LaneDriver, u32
from tests.worker.programs.test_passes import PAGE, same, text

KINDS = ("llama", "qwen3", "gemma3", "mistral")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def driver(kind: str, tokenizer: Tokenizer) -> Iterator[LaneDriver]:  # noqa: F811
    one = LaneDriver(tiny_model(kind, page_tokens=PAGE), tokenizer)
    one.open(1)
    yield one
    one.end()
    one.engine.check()


def feed(driver: LaneDriver, number: int, vectors: NDArray[np.float32], **wants: Rows) -> Gave:
    tokens = len(vectors)
    one = PassInput(number, has_embeddings=True, **wants)  # type: ignore[arg-type]
    frames = [u32([0] * tokens), np.ascontiguousarray(vectors, "<f4").tobytes()]
    return driver.gave(driver.call(RunPass(driver.number(), (one,)), frames))


def vectors_of(kind: str, count: int, seed: int) -> NDArray[np.float32]:
    """Return vectors as large as the model's own, none of them a token's."""
    table = oracle(kind).get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    table = table.detach()
    noise = torch.randn(count, table.shape[1], generator=torch.Generator().manual_seed(seed))
    found: NDArray[np.float32] = (noise * table.std()).numpy()
    return found


def test_tokens_and_embeddings_in_turns_are_the_models_own(kind: str, driver: LaneDriver) -> None:
    module, ids = oracle(kind), text(30)
    vectors = vectors_of(kind, 21, 3)
    parts = [
        driver.feed(1, ids[:19], logits=Rows.ALL),
        feed(driver, 1, vectors, logits=Rows.ALL),
        driver.feed(1, ids[19:], logits=Rows.ALL),
    ]
    with torch.inference_mode():
        own = module.get_input_embeddings()(torch.tensor([ids]))[0]
        given = torch.cat([own[:19], torch.from_numpy(vectors).to(own), own[19:]])
        want = module(inputs_embeds=given[None], use_cache=False).logits[0].double()
    got = np.concatenate([one.logits for one in parts if one.logits is not None])
    same(got, want, 1e-5)
    assert not driver.held(1).is_pure


def test_what_came_from_embeddings_is_nobody_elses_prefix(driver: LaneDriver, kind: str) -> None:
    feed(driver, 1, vectors_of(kind, 4 * PAGE, 1))
    driver.open(2)
    driver.feed(2, [0] * (4 * PAGE))
    assert driver.held(2).cached_tokens == 0


@pytest.mark.parametrize("kind", ["llama"], indirect=True)
def test_embeddings_that_cannot_be_meant_are_refused(driver: LaneDriver, kind: str) -> None:
    good = vectors_of(kind, 5, 1)
    bad = good.copy()
    bad[2, 3] = np.nan
    for vectors in (bad, good[:, :-1]):
        with pytest.raises(Failed) as failed:
            feed(driver, 1, vectors)
        assert failed.value.told.trouble is Trouble.BAD_CALL
    assert driver.held(1).next_slot == 0

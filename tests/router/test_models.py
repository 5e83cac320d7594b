"""Which models are there: tokenizers that cannot be loaded, and what is let go of."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pie.index.contract import PlaceRecord
from pie.page.events import Epoch, PlaceId, PlaceKind
from pie.page.key import RootKey
from pie.router.memory import AnswerMemory
from pie.router.models import ModelCatalog
from pie.router.turns import Turns
from pie.router.workers import WorkerSet
from pie.tokens.pieces import PieceMemory
from pie.tokens.tokenizer import Tokenizer
from tests.router.conftest import until


def record(place: str, folder: Path, digest: str, *, model: str = "m") -> PlaceRecord:
    return PlaceRecord(
        PlaceId(place),
        Epoch(1),
        PlaceKind.WORKER,
        "no such address",
        model_root=RootKey(bytes(32)),
        model_name=model,
        tokenizer_path=str(folder),
        tokenizer_digest=digest,
        vocab_size=10,
    )


@pytest.fixture
def catalog() -> Iterator[ModelCatalog]:
    with ThreadPoolExecutor(1) as threads:
        yield ModelCatalog(
            memory=AnswerMemory(0),
            pieces=PieceMemory(0),
            thread_bytes=0,
            threads=threads,
            turns=Turns(threads, at_once=1, most_waiting=10),
            on_change=lambda: None,
        )


@pytest.mark.parametrize("error", [RuntimeError("odd"), KeyError("odd"), MemoryError("odd")])
async def test_a_tokenizer_that_fails_in_any_way_is_said_and_left_alone(
    catalog: ModelCatalog,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loads = 0

    def load(folder: Path) -> Tokenizer:
        nonlocal loads
        loads += 1
        raise error

    monkeypatch.setattr(Tokenizer, "load", load)
    worker = record("w0", tmp_path, "d")
    catalog.update([worker])
    await until(lambda: bool(catalog.problems))
    for _ in range(3):
        catalog.update([worker])
        await asyncio.sleep(0.02)
    assert loads == 1
    assert "w0" in catalog.problems[0]
    assert "log says why" in catalog.problems[0], "a client is told no names of ours"
    assert "odd" in caplog.text
    # Once the worker is gone, so is its problem.
    catalog.update([])
    assert catalog.problems == ()


async def test_tokenizers_and_names_that_nobody_serves_any_more_are_let_go_of(
    catalog: ModelCatalog, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loads = 0

    def load(folder: Path) -> SimpleNamespace:
        nonlocal loads
        loads += 1
        return SimpleNamespace(added_tokens=(), digest=folder.name, special_ids=(), vocab_size=10)

    monkeypatch.setattr(Tokenizer, "load", load)
    monkeypatch.setattr("pie.router.models.ChatTemplate", SimpleNamespace(load=lambda folder: None))
    kept = record("kept", tmp_path / "kept", "kept", model="kept")

    def serves(name: str) -> bool:
        catalog.update([kept, record(name, tmp_path / name, name, model=name)])
        return catalog.get(name) is not None

    for number in range(1200):
        # Most come and go before their tokenizers are loaded.
        serves(f"m{number}")
    for number in range(1190, 1200):
        await until(partial(serves, f"m{number}"))
    catalog.update([kept])
    assert [model.name for model in catalog.models] == ["kept"]
    assert catalog.was_served("m1199")
    assert catalog.was_served("kept")
    assert not catalog.was_served("m0")
    # One that was just there is not loaded anew, and one from long ago is.
    before = loads
    assert serves("m1199")
    assert not serves("m1190")
    await until(lambda: loads == before + 1)


async def test_a_worker_that_is_left_out_is_said_once_and_forgotten_when_it_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = WorkerSet(1)
    for number in range(10):
        for _ in range(3):
            workers.sync([record(f"w{number}", tmp_path, "d")])
        assert not workers.links
        assert len(workers._refused) == 1
    workers.sync([])
    assert not workers._refused
    assert len(caplog.messages) == 10
    assert "is not an address" in caplog.text
    await workers.close()

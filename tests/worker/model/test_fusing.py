"""Layers that run as one operation compute what their modules do."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from pie.worker.attention.native import native_backend
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.cpu import cpu_features
from pie.worker.fusing import FusedLayer, fuse_layers, fused_layers, unfused
from pie.worker.model import Model
from pie.worker.native.panels import FEW_ROWS
from pie.worker.selfcheck import verify
from pie.worker.settings import DEFAULT_CACHE_FOLDER
from tests.support.equality import Sequences
from tests.support.models import tiny_model

CPU = torch.device("cpu")
HAS_BFLOAT16 = bool({"avx512_bf16", "amx_bf16"} & cpu_features())
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 matrices on this CPU"),
    ),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.04}


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None:
        pytest.skip("the kernels cannot be built here")


def fused_model(kind: str, dtype: torch.dtype = torch.float32) -> Model:
    model = tiny_model(kind, dtype=dtype)
    fuse_layers(model.module, dtype=dtype, device=CPU)
    return model


def steps(model: Model) -> list[torch.Tensor]:
    """Return the logits of a prompt in chunks, of decode beside another prompt, and of decode."""
    run = Sequences(model, pages=12).runner
    first = [(7 * i) % 200 + 3 for i in range(40)]
    second = [(11 * i) % 200 + 3 for i in range(30)]
    one, two = [9, 2, 5], [1, 7, 4]
    batches = [
        [Pass(1, first[:17], 0, one, LogitRows.ALL)],
        [Pass(1, first[17:33], 17, one, LogitRows.ALL), Pass(2, second[:9], 0, two, LogitRows.ALL)],
        [Pass(1, first[33:34], 33, one), Pass(2, second[9:20], 9, two, LogitRows.ALL)],
        [Pass(2, second[20:21], 20, two), Pass(1, first[34:35], 34, one)],
        [Pass(1, first[35:36], 35, one)],
    ]
    return [run.run(Batch(passes)).logits for passes in batches]


def off_by(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    pairs = zip(got, want, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_a_fused_model_gives_the_logits_of_its_modules(kind: str, dtype: torch.dtype) -> None:
    model = fused_model(kind, dtype)
    assert len(fused_layers(model.module)) == model.layers
    got = steps(model)
    with unfused(model.module):
        want = steps(model)
    assert any(not torch.equal(a, b) for a, b in zip(got, want, strict=True)) or dtype.itemsize == 4
    assert off_by(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("part", ["qkv", "output", "gate_up", "down", "input_norm", "post_norm"])
def test_each_weight_counts(part: str) -> None:
    model = fused_model("llama")
    want = steps(model)
    for layer in fused_layers(model.module):
        with torch.inference_mode():
            getattr(layer.weights, part).mul_(0.9)
    assert off_by(steps(model), want) > 1e-3


@pytest.mark.parametrize("kind", ["gemma3", "gemma2", "gpt2", "lfm2", "falcon_h1", "qwen3_next"])
def test_layers_of_another_shape_stay_as_they_are(kind: str) -> None:
    assert not fused_layers(fused_model(kind).module)


def test_a_step_of_many_rows_runs_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused_model("llama")
    calls: list[torch.Size] = []
    for layer in fused_layers(model.module):
        layer.plain.register_forward_hook(lambda _m, _i, out: calls.append(out.shape))
    pages = list(range(12))
    run = Sequences(model, pages=12).runner
    ids = [(3 * i) % 200 + 3 for i in range(FEW_ROWS + 1)]
    run.run(Batch([Pass(1, ids[:FEW_ROWS], 0, pages)]))
    assert not calls
    run.run(Batch([Pass(1, ids, 0, pages)]))
    assert len(calls) == model.layers


def test_a_mask_goes_through_the_modules() -> None:
    model = fused_model("llama")
    run = Sequences(model, pages=3).runner
    ids = list(range(3, 12))
    mask = torch.ones((9, 9), dtype=torch.bool)
    mask[5:, 2] = False
    masked = run.run(Batch([Pass(1, ids, 0, [0], LogitRows.ALL, mask=mask)])).logits
    with unfused(model.module):
        want = run.run(Batch([Pass(1, ids, 0, [0], LogitRows.ALL, mask=mask)])).logits
    assert torch.equal(masked, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_in_its_row(dtype: torch.dtype) -> None:
    model = fused_model("llama", dtype)
    run = Sequences(model, pages=4).runner
    clean = run.run(Batch([Pass(1, [5, 6], 0, [0]), Pass(2, [7, 8], 0, [1])]))
    with torch.inference_mode():
        model.module.get_input_embeddings().get_parameter("weight")[6] = torch.nan
    spoilt = run.run(Batch([Pass(1, [5, 6], 0, [2]), Pass(2, [7, 8], 0, [3])]))
    assert bool(spoilt.of(0).isnan().all())
    assert torch.equal(spoilt.of(1), clean.of(1))


def test_layers_that_compute_otherwise_are_taken_apart_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = fused_model("llama")
    with unfused(model.module):
        want = steps(model)
    layer = fused_layers(model.module)[0]
    layer.weights = dataclasses.replace(layer.weights, epsilon=0.5)
    with caplog.at_level(logging.WARNING):
        verify(model)
    assert "operation by operation" in caplog.text
    assert not any(isinstance(part, FusedLayer) for part in model.module.modules())
    assert off_by(steps(model), want) == 0


def test_without_memory_for_a_second_kind_nothing_is_fused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pie.worker.fusing.free_bytes", lambda _device: 0)
    assert not fused_layers(fused_model("llama").module)

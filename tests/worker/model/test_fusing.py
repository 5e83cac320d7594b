"""Layers that run as one operation compute what their modules do."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Ernie4_5Config,
    GraniteConfig,
    Ministral3Config,
    PreTrainedConfig,
    SmolLM3Config,
)

from pie.worker.attention import hook
from pie.worker.attention.native import native_backend
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.cpu import multiplies_bfloat16
from pie.worker.fusing import FusedLayer, fuse_layers, fused_layers, unfused
from pie.worker.model import Model
from pie.worker.native.layer import LayerWeights
from pie.worker.selfcheck import verify
from pie.worker.settings import DEFAULT_CACHE_FOLDER
from tests.support.equality import Sequences
from tests.support.models import tiny_model

CPU = torch.device("cpu")
HAS_BFLOAT16 = multiplies_bfloat16()
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 matrices on this CPU"),
    ),
]
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.06}
"""Against modules that compute in float32 with the same weights."""


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None:
        pytest.skip("the kernels cannot be built here")


def fused_model(kind: str, dtype: torch.dtype = torch.float32) -> Model:
    model = tiny_model(kind, dtype=dtype)
    fuse_layers(model.module, dtype=dtype, device=CPU, kv_bytes=0)
    return model


def exact_model(kind: str, dtype: torch.dtype) -> Model:
    """Return the same model, computed by its modules in float32 from the same weights."""
    model = tiny_model(kind)
    model.module.load_state_dict(tiny_model(kind, dtype=dtype).module.state_dict())
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
    want = steps(exact_model(kind, dtype))
    assert off_by(got, want) < TOLERANCE[dtype]
    with unfused(model.module):
        rounded_throughout = steps(model)
    assert dtype is torch.float32 or off_by(got, want) < off_by(rounded_throughout, want)


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


@pytest.mark.parametrize("config", [Ministral3Config, GraniteConfig, Ernie4_5Config, SmolLM3Config])
def test_layers_with_the_same_parts_that_compute_otherwise_stay_as_they_are(
    config: type[PreTrainedConfig],
) -> None:
    """Ministral's queries grow past a position that no check at a start reaches."""
    module = AutoModelForCausalLM.from_config(config(**SMALL))  # type: ignore[no-untyped-call]
    assert fuse_layers(module, dtype=torch.float32, device=CPU, kv_bytes=0) == 0


def test_an_argument_that_is_not_known_goes_through_the_modules() -> None:
    layer = fused_layers(fused_model("llama").module)[0]
    seen: list[object] = []
    layer.plain.forward = lambda *args, **kwargs: seen.append(kwargs)
    angles = torch.zeros((1, 3, 16))
    hidden = torch.zeros((1, 3, 32))
    with hook.answering(_Answers()):
        assert layer(hidden, position_embeddings=(angles, angles)) is hidden
        layer(hidden, position_embeddings=(angles, angles), temperatures=hidden)
    assert len(seen) == 1


class _Answers:
    """Computes each layer as nothing."""

    def decoder_layer(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor:
        return hidden

    def attend(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        raise AssertionError

    def mask(self, _mask_function: object) -> None:
        raise AssertionError


@pytest.mark.skipif(not HAS_BFLOAT16, reason="no bfloat16 matrices on this CPU")
@pytest.mark.parametrize("dim", [48, 64])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("slot", [0, 7, 16, 40])
def test_a_key_that_is_not_a_number_is_not_lost_in_the_sum(
    dim: int, value: float, slot: int
) -> None:
    keys = torch.randn(3, 16, 1, dim).bfloat16()
    keys.view(48, dim)[slot] = value
    query = torch.randn(1, 2, dim).abs().bfloat16()
    out = torch.empty_like(query)
    spans, table = torch.tensor([[0, 1, 40, 0]]), torch.arange(3)
    torch.ops.pie.attend(
        query, keys, keys.clone().nan_to_num(0, 0, 0), out, spans, table, 1, 0, 0, True
    )
    assert bool(out.isnan().any(dim=-1).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 64, 255, 256, 257, 300])
def test_steps_of_any_size_are_one_operation_a_layer(rows: int, dtype: torch.dtype) -> None:
    model = fused_model("llama", dtype)
    calls: list[torch.Size] = []
    for layer in fused_layers(model.module):
        layer.plain.register_forward_hook(lambda _m, _i, out: calls.append(out.shape))
    run = Sequences(model, pages=40).runner
    ids = [(3 * i) % 200 + 3 for i in range(rows)]
    batch = Batch([Pass(1, ids, 0, list(range(40)), LogitRows.ALL)])
    got = run.run(batch).logits
    assert not calls
    with unfused(model.module):
        run.run(batch)
    assert len(calls) == model.layers
    want = Sequences(exact_model("llama", dtype), pages=40).runner.run(batch).logits
    assert off_by([got], [want]) < TOLERANCE[dtype]


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

"""Packed weights compute what the plain ones do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pie.worker import packing
from pie.worker.attention.native import native_backend
from pie.worker.cpu import multiplies_bfloat16
from pie.worker.huge_pages import HugePages
from pie.worker.packing import PackedLinear, in_onednn, in_panels, pack_weights
from pie.worker.settings import DEFAULT_CACHE_FOLDER
from tests.support.models import tiny_module

CPU = torch.device("cpu")
SUPPORTED = torch.ops.mkldnn._is_mkldnn_bf16_supported()
needs_bfloat16 = pytest.mark.skipif(not SUPPORTED, reason="oneDNN has no bfloat16 on this CPU")


@needs_bfloat16
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 65, 300])
@pytest.mark.parametrize("packed_rows", [None, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_gives_the_same(rows: int, packed_rows: int | None, bias: bool) -> None:
    linear = nn.Linear(48, 80, bias=bias).to(torch.bfloat16).requires_grad_(False)
    packed = PackedLinear(linear, in_onednn(linear), packed_rows=packed_rows)
    x = torch.randn(1, rows, 48).bfloat16()
    assert torch.allclose(packed(x), linear(x), rtol=2e-2, atol=2e-2)
    assert packed.weight.dtype is torch.bfloat16
    assert packed.weight.shape == (80, 48)


@needs_bfloat16
def test_every_linear_layer_of_a_model_is_packed_and_its_memory_let_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "cpu_features", lambda: frozenset({"avx512_bf16"}))
    plain = tiny_module("llama", dtype=torch.bfloat16)
    module = copy.deepcopy(plain)
    count = sum(type(part) is nn.Linear for part in plain.modules())
    assert (
        pack_weights(module, dtype=torch.bfloat16, device=CPU, kv_bytes=0, has_kernels=False)
        == count
    )
    assert not any(type(part) is nn.Linear for part in module.modules())
    packed = [part for part in module.modules() if isinstance(part, PackedLinear)]
    assert all(part.weight.device.type == "meta" for part in packed)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        got, want = module(ids).logits, plain(ids).logits
    assert float((got - want).abs().max() / want.abs().max()) < 0.05


@needs_bfloat16
def test_with_amx_both_kinds_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "cpu_features", lambda: frozenset({"amx_bf16"}))
    module = tiny_module("llama", dtype=torch.bfloat16)
    pack_weights(module, dtype=torch.bfloat16, device=CPU, kv_bytes=0, has_kernels=False)
    packed = [part for part in module.modules() if isinstance(part, PackedLinear)]
    assert packed
    assert all(part.packed_rows == 64 and part.weight.device == CPU for part in packed)


@needs_bfloat16
def test_with_amx_and_little_memory_only_the_packed_kind_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "cpu_features", lambda: frozenset({"amx_bf16"}))
    monkeypatch.setattr(packing, "free_bytes", lambda _device: 0)
    module = tiny_module("llama", dtype=torch.bfloat16)
    pack_weights(module, dtype=torch.bfloat16, device=CPU, kv_bytes=0, has_kernels=False)
    packed = [part for part in module.modules() if isinstance(part, PackedLinear)]
    assert all(part.weight.device.type == "meta" for part in packed)


@needs_bfloat16
@pytest.mark.parametrize("rows", [0, 1, 3, 5, 16, 64])
@pytest.mark.parametrize("outputs", [16, 80, 96, 192])
@pytest.mark.parametrize("bias", [False, True])
def test_our_kernels_product_is_the_same(rows: int, outputs: int, bias: bool) -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None:
        pytest.skip("the kernels cannot be built here")
    linear = nn.Linear(48, outputs, bias=bias).to(torch.bfloat16).requires_grad_(False)
    product = in_panels(linear, HugePages())
    assert product is not None
    x = torch.randn(1, rows, 48).bfloat16()
    got = product(x)
    assert got.shape == (1, rows, outputs)
    assert torch.allclose(got, linear(x), rtol=2e-2, atol=2e-2)


@needs_bfloat16
def test_logits_are_not_rounded() -> None:
    if native_backend(DEFAULT_CACHE_FOLDER) is None or not multiplies_bfloat16():
        pytest.skip("no kernel for bfloat16 here")
    module = tiny_module("llama", dtype=torch.bfloat16)
    head = nn.Linear(48, 96, bias=False).to(torch.bfloat16).requires_grad_(False)
    module.lm_head = head
    pack_weights(module, dtype=torch.bfloat16, device=CPU, kv_bytes=0, has_kernels=True)
    packed = module.lm_head
    assert isinstance(packed, PackedLinear)
    x = torch.randn(1, 70, 48).bfloat16()
    got, want = packed(x), x.double() @ head.weight.double().T
    assert got.dtype is torch.float32
    assert torch.allclose(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 20), (47, 32)])
def test_a_weight_that_has_no_panels_is_left_to_onednn(inputs: int, outputs: int) -> None:
    linear = nn.Linear(inputs, outputs).to(torch.bfloat16)
    assert in_panels(linear, HugePages()) is None


def test_float32_stays_as_it_is() -> None:
    assert (
        pack_weights(
            tiny_module("llama"), dtype=torch.float32, device=CPU, kv_bytes=0, has_kernels=False
        )
        == 0
    )

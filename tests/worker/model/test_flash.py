"""The flash backend lays steps out as its kernels want them.

There is no GPU to test on, so a plain-PyTorch model of the kernels' contract stands in for them, and
the packages' own functions are given as their signatures with that model behind them.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch

from pie.worker.arena import Arena
from pie.worker.attention import conformance, flash_packages
from pie.worker.attention.conformance import CASES, Case, declared, names
from pie.worker.attention.flash import TILE_TOKENS, FlashBackend, FlashPlan, VarlenBatch
from pie.worker.attention.flash_contract import ContractBroken, ContractKernel
from pie.worker.attention.flash_packages import FlashUnavailable, PackageKernel
from pie.worker.attention.protocol import Span
from pie.worker.attention.select import choose
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.errors import UnsupportedModel
from pie.worker.runner import Runner
from tests.support.models import tiny_model

CPU = torch.device("cpu")
FLASH = declared(FlashBackend(ContractKernel()).capabilities)
HALVES = tuple(case for case in FLASH if case.dtype is not torch.float32)


def _call(
    kernel: ContractKernel,
    batch: VarlenBatch,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    scale: float,
    window: tuple[int, int],
    softcap: float,
) -> torch.Tensor:
    query, keys, values = tensors
    out = torch.empty_like(query) if out is None else out
    kernel.attend(batch, query, keys, values, out, scaling=scale, window=window, softcap=softcap)
    return out


def _flash_attn_2_8(kernel: ContractKernel) -> Callable[..., torch.Tensor]:
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert causal
        assert not any((dropout_p, deterministic, return_attn_probs, alibi_slopes))
        used = cu_seqlens_k.diff()
        batch = VarlenBatch(
            cu_seqlens_q, cu_seqlens_k, used, max_seqlen_q, max_seqlen_k, block_table
        )
        return _call(kernel, batch, (q, k, v), None, softmax_scale, window_size, softcap)

    return flash_attn_varlen_func


def _vllm_flash_attn_2_6(kernel: ContractKernel) -> Callable[..., torch.Tensor]:
    older = _flash_attn_2_8(kernel)

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
        *,
        out: torch.Tensor,
    ) -> torch.Tensor:
        result = older(
            q,
            k,
            v,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            dropout_p,
            softmax_scale,
            causal,
            window_size,
            softcap,
            alibi_slopes,
            deterministic,
            return_attn_probs,
            block_table,
        )
        return out.copy_(result)

    return flash_attn_varlen_func


def _vllm_0_32(kernel: ContractKernel) -> Callable[..., torch.Tensor]:
    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        q_v: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        softmax_scale: float = 1.0,
        causal: bool = False,
        window_size: tuple[int, int] | None = None,
        softcap: float = 0.0,
        block_table: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        fa_version: int = 2,
    ) -> torch.Tensor:
        assert causal
        assert not any((dropout_p, q_v))
        assert fa_version == 3
        assert window_size is not None
        assert out is not None
        assert (cu_seqlens_k is None) != (seqused_k is None)
        assert block_table is None or seqused_k is not None
        used = seqused_k if seqused_k is not None else torch.diff(_given(cu_seqlens_k))
        sums = torch.zeros_like(cu_seqlens_q)
        sums[1:] = used.cumsum(0)
        batch = VarlenBatch(cu_seqlens_q, sums, used, max_seqlen_q, max_seqlen_k, block_table)
        return _call(kernel, batch, (q, k, v), out, softmax_scale, window_size, softcap)

    return flash_attn_varlen_func


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


FUNCTIONS = {
    "vllm.vllm_flash_attn": _vllm_0_32,
    "vllm_flash_attn": _vllm_flash_attn_2_6,
    "flash_attn": _flash_attn_2_8,
}


def package_kernel(name: str) -> tuple[PackageKernel, ContractKernel]:
    multiple = flash_packages.PACKAGES[name]
    contract = ContractKernel(multiple)
    function = FUNCTIONS[name](contract)
    made = PackageKernel(name, function, multiple, version=3, devices=frozenset({"cpu"}))
    return made, contract


@pytest.mark.parametrize("case", FLASH, ids=names(FLASH))
def test_flash_lays_out_every_case_as_the_contract_wants_it(case: Case) -> None:
    conformance.run(FlashBackend(ContractKernel()), case)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("case", HALVES, ids=names(HALVES))
def test_every_packages_function_is_called_as_it_is_declared(name: str, case: Case) -> None:
    conformance.run(FlashBackend(package_kernel(name)[0]), case)


@pytest.fixture
def on_cuda(request: pytest.FixtureRequest) -> FlashBackend:
    try:
        return FlashBackend(flash_packages.kernel(request.param))
    except FlashUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("on_cuda", FUNCTIONS, indirect=True)
@pytest.mark.parametrize("case", HALVES, ids=names(HALVES))
def test_flash_does_every_case_that_it_declares_on_cuda(on_cuda: FlashBackend, case: Case) -> None:
    conformance.run(on_cuda, case, "cuda")


@pytest.mark.parametrize(
    ("name", "case_name", "calls"),
    [
        ("vllm.vllm_flash_attn", "mixed", 1),
        ("vllm.vllm_flash_attn", "pages_of_4", 0),
        ("flash_attn", "mixed", 0),
        ("flash_attn", "pages_of_256", 1),
    ],
)
def test_a_block_table_is_used_where_the_kernel_takes_pages_of_this_size(
    name: str, case_name: str, calls: int
) -> None:
    made, contract = package_kernel(name)
    conformance.run(FlashBackend(made), next(case for case in HALVES if case.name == case_name))
    assert contract.paged_calls == calls


def test_masks_scores_float32_and_odd_heads_are_left_to_torch() -> None:
    able = FlashBackend(package_kernel("flash_attn")[0]).capabilities
    left = {case.name for case in CASES} - {case.name for case in declared(able)}
    assert left == {
        "mask",
        "mask_and_window",
        "mask_of_heads",
        "mask_of_heads_and_window",
        "mask_over_dead_slots",
        "mask_that_leaves_nothing",
        "odd_heads",
        "scores",
        "scores_and_mask",
        "scores_and_softcap",
        "unequal_dims",
    }
    assert torch.float32 not in able.dtypes


def test_a_block_table_is_filled_up_to_whole_tiles_with_a_sequences_own_pages() -> None:
    spans = [Span(0, 1, 20, [7, 3]), Span(1, 1, 299, [*range(10, 29)])]
    batch = FlashPlan(ContractKernel(), spans, 16, CPU)._batch
    assert batch.block_table is not None
    short, long = batch.block_table.tolist()
    assert len(short) * 16 == 2 * TILE_TOKENS
    assert short == [7, 3] + [7] * 30
    assert long == [*range(10, 29)] + [10] * 13
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2]
    assert batch.seqused_k.tolist() == [21, 300]
    assert batch.cu_seqlens_k.tolist() == [0, 21, 321]


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_step_that_masks_and_scores_some_of_its_passes_is_split_between_flash_and_torch(
    kind: str,
) -> None:
    model = tiny_model(kind)
    mask = torch.ones((1, 6), dtype=torch.bool)
    mask[0, 2] = False
    first = [
        Pass(0, [5, 6, 7, 8, 9], 0, [1]),
        Pass(1, [15, 16, 17, 18], 0, [2]),
        Pass(2, [25, 26, 27], 0, [3]),
    ]
    second = [
        Pass(0, [3], 5, [1], mask=mask),
        Pass(1, [4, 5], 4, [2]),
        Pass(2, [6], 3, [3], scores_queries=1),
        Pass(3, [7, 8, 9], 0, [0], logits=LogitRows.ALL),
    ]

    def results(runner: Runner) -> tuple[torch.Tensor, torch.Tensor]:
        runner.run(Batch(first))
        output = runner.run(Batch(second))
        scores = output.scores[2]
        assert scores is not None
        return output.logits, scores

    kernel = ContractKernel()
    with_flash = results(Runner(model, Arena(model.layout, 4), FlashBackend(kernel)))
    with_torch = results(Runner(model, Arena(model.layout, 4), TorchBackend()))
    assert kernel.paged_calls == 2 * len(model.specs)
    for got, want in zip(with_flash, with_torch, strict=True):
        assert float((got - want).abs().max()) <= 1e-5 * float(want.abs().max())


Change = Callable[[VarlenBatch], VarlenBatch]


def changed(**fields: object) -> Change:
    return lambda batch: dataclasses.replace(batch, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed(max_seqlen_q=1), "max_seqlen_q 1"),
        (changed(max_seqlen_k=512), "max_seqlen_k 512"),
        (lambda b: changed(cu_seqlens_q=b.cu_seqlens_q.long())(b), "int64, not int32"),
        (lambda b: changed(cu_seqlens_q=b.cu_seqlens_q - 1)(b), "do not rise from 0"),
        (lambda b: changed(seqused_k=b.seqused_k + 1)(b), "two different lengths"),
        (lambda b: changed(block_table=_given(b.block_table)[:, :8])(b), "not contiguous"),
        (
            lambda b: changed(block_table=_given(b.block_table)[:, :8].contiguous())(b),
            "8 pages wide",
        ),
        (lambda b: changed(block_table=_given(b.block_table) + 90)(b), "outside of the arena"),
    ],
)
def test_the_contract_refuses_what_a_kernel_would_read_wrongly(change: Change, why: str) -> None:
    spans = [Span(0, 2, 20, [1, 2]), Span(2, 1, 199, list(range(3, 16)))]
    kernel = ContractKernel()
    batch = FlashPlan(kernel, spans, 16, CPU)._batch
    query, keys = torch.randn((3, 4, 8)), torch.randn((20, 16, 2, 8))
    kernel.attend(
        batch, query, keys, keys, query.clone(), scaling=1.0, window=(-1, -1), softcap=0.0
    )
    with pytest.raises(ContractBroken, match=why):
        kernel.attend(
            change(batch),
            query,
            keys,
            keys,
            query.clone(),
            scaling=1.0,
            window=(-1, -1),
            softcap=0.0,
        )


def test_the_contract_refuses_a_query_whose_neighbours_lie_apart() -> None:
    kernel = ContractKernel()
    batch = FlashPlan(kernel, [Span(0, 2, 0, [0])], 16, CPU)._batch
    apart, keys = torch.randn((2, 8, 4)).transpose(1, 2), torch.randn((1, 16, 2, 8))
    with pytest.raises(ContractBroken, match="query is not contiguous"):
        kernel.attend(
            batch, apart, keys, keys, apart.clone(), scaling=1.0, window=(-1, -1), softcap=0.0
        )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, object], None]]:
    def install(name: str, function: object) -> None:
        module = types.ModuleType(name)
        module.__spec__ = None
        module.__dict__["flash_attn_varlen_func"] = function
        monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("importlib.util.find_spec", lambda one: name if one == name else None)

    flash_packages._checked.cache_clear()
    yield install
    flash_packages._checked.cache_clear()


def test_a_package_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(FlashUnavailable, match="flash_attn is not installed"):
        flash_packages.kernel("flash_attn")


def test_a_package_without_softcaps_is_too_old(
    installed: Callable[[str, object], None],
) -> None:
    installed("flash_attn", lambda q, k, v: q)
    with pytest.raises(FlashUnavailable, match=r"flash_attn is too old: it has no block_table, .*"):
        flash_packages.kernel("flash_attn")


def test_a_package_that_does_not_load_says_why(
    installed: Callable[[str, object], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("flash_attn", None)

    def fail(_name: str) -> object:
        raise ImportError("undefined symbol: _ZN3c10")

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(FlashUnavailable, match=r"does not load .undefined symbol"):
        flash_packages.kernel("flash_attn")


def test_a_kernel_that_computes_wrongly_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    class Wrong(ContractKernel):
        def attend(self, *args: object, **options: object) -> None:
            super().attend(*args, **{**options, "softcap": 0.0})  # type: ignore[arg-type]

    flash_packages.check(FlashBackend(ContractKernel()), CPU)
    with pytest.raises(FlashUnavailable, match="outputs are off"):
        flash_packages.check(FlashBackend(Wrong()), CPU)
    assert "contract is not used" in caplog.text


def test_a_kernel_that_fails_on_the_device_is_not_used() -> None:
    class Old(ContractKernel):
        def attend(self, *_args: object, **_options: object) -> None:
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    with pytest.raises(FlashUnavailable, match=r"fails here .FlashAttention only supports Ampere"):
        flash_packages.check(FlashBackend(Old()), CPU)


@pytest.mark.parametrize(
    ("device", "dtype", "available", "why"),
    [
        ("cpu", torch.bfloat16, False, "flash kernels run on CUDA, and the model is on cpu"),
        ("cuda", torch.bfloat16, False, "there is no CUDA here"),
        ("cuda", torch.float32, True, "the model is in torch.float32"),
        ("cuda", torch.bfloat16, True, "flash_attn is not installed"),
    ],
)
def test_asking_for_flash_where_there_is_none_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, available: bool, why: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    model = tiny_model("llama")
    arguments = {"dtype": dtype, "device": torch.device(device), "cache_folder": model.cache_folder}
    with pytest.raises(UnsupportedModel, match=why) as refusal:
        choose("flash", model.specs, **arguments)  # type: ignore[arg-type]
    assert "[model] attention to auto" in str(refusal.value)
    if device == "cuda":
        chosen = choose("auto", model.specs, **arguments)  # type: ignore[arg-type]
        assert [backend.name for backend in chosen] == ["torch"]


def test_on_cuda_auto_takes_flash_where_it_is_installed_and_able(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = PackageKernel("flash_attn", _flash_attn_2_8(ContractKernel(256)), 256)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(flash_packages, "_checked", lambda _name, _device: made)
    model = tiny_model("llama")
    for specs, names_ in (
        (model.specs, ["flash", "torch"]),
        ([dataclasses.replace(spec, key_dim=20, value_dim=20) for spec in model.specs], ["torch"]),
    ):
        chosen = choose(
            "auto",
            specs,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            cache_folder=model.cache_folder,
        )
        assert [backend.name for backend in chosen] == names_

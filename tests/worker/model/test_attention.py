"""Every attention backend passes the shipped suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pie.worker.attention import conformance
from pie.worker.attention.conformance import CASES, Case, declared, names
from pie.worker.attention.native import NativeBackend, native_backend
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.settings import DEFAULT_CACHE_FOLDER

NATIVE = declared(NativeBackend.capabilities)
LONG = tuple(case for case in NATIVE if "long" in case.name or case.name == "mixed")
BFLOAT16 = tuple(case for case in NATIVE if case.dtype is torch.bfloat16)


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    backend = native_backend(DEFAULT_CACHE_FOLDER)
    if backend is None:
        pytest.skip("no C++ compiler here, so no native backend")
    return backend


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES, ids=names())
def test_torch_does_every_case(case: Case) -> None:
    conformance.run(TorchBackend(), case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
@pytest.mark.parametrize("case", CASES, ids=names())
def test_torch_does_every_case_on_cuda(case: Case) -> None:
    conformance.run(TorchBackend(), case, "cuda")


@pytest.mark.parametrize("case", NATIVE, ids=names(NATIVE))
def test_native_does_every_case_that_it_declares(native: NativeBackend, case: Case) -> None:
    conformance.run(native, case)


@pytest.mark.parametrize("case", LONG, ids=names(LONG))
@pytest.mark.usefixtures("two_threads")
def test_native_threads_do_not_disturb_one_another(native: NativeBackend, case: Case) -> None:
    conformance.run(native, case)


@pytest.mark.parametrize("case", BFLOAT16, ids=names(BFLOAT16))
@pytest.mark.usefixtures("native")
def test_native_is_right_where_the_cpu_has_no_bfloat16_products(case: Case) -> None:
    conformance.run(NativeBackend(matrix_bfloat16=False), case)


def test_a_case_that_a_backend_does_not_declare_is_not_run(native: NativeBackend) -> None:
    masked = next(case for case in CASES if case.name == "mask")
    with pytest.raises(conformance.Unsupported, match="does not do mask"):
        conformance.run(native, masked)

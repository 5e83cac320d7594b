"""Every attention backend passes the shipped suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pie.worker.attention import conformance
from pie.worker.attention.conformance import CASES, Case, names
from pie.worker.attention.native import NativeBackend, native_backend
from pie.worker.attention.protocol import AttentionBackend
from pie.worker.attention.torch_backend import TorchBackend
from pie.worker.settings import DEFAULT_CACHE_FOLDER


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(backend: AttentionBackend, case: Case, device: str = "cpu") -> None:
    try:
        conformance.run(backend, case, device)
    except conformance.Unsupported as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("case", CASES, ids=names())
def test_torch_does_every_case(case: Case) -> None:
    conformance.run(TorchBackend(), case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("case", CASES, ids=names())
def test_torch_does_every_case_on_cuda(case: Case) -> None:
    run(TorchBackend(), case, "cuda")


@pytest.fixture(scope="session")
def native() -> NativeBackend:
    backend = native_backend(DEFAULT_CACHE_FOLDER)
    if backend is None:
        pytest.skip("no C++ compiler here, so no native backend")
    return backend


@pytest.mark.parametrize("case", CASES, ids=names())
def test_native_does_every_case_that_it_declares(native: NativeBackend, case: Case) -> None:
    run(native, case)

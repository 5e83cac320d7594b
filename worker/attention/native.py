"""Attention over pages on a CPU, compiled once per host.

Covers building `native.cpp` with the host's C++ compiler, loading it, and the backend over it. Does
not cover masks, scores and other devices, which go to `torch`. Where there is no compiler, or what
it makes fails the check, there is no such backend, and the log says why.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from blake3 import blake3
from torch.utils import cpp_extension

from pie.worker.attention import conformance
from pie.worker.attention.protocol import AttentionSpec, Capabilities, Plan, Span
from pie.worker.cpu import cpu_features

log = logging.getLogger("pie.worker.attention.native")

_SOURCE = Path(__file__).with_name("native.cpp")
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-w",
)
_BUILD_TIMEOUT_S = 300.0
_CHECKED = ("decode", "mixed", "window")

_loading = threading.Lock()
_loaded: bool | None = None


class NativeBackend:
    """Compiled attention for float32 and bfloat16 on the CPU."""

    name = "native"
    capabilities = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset({torch.float32, torch.bfloat16}),
        mask=False,
        scores=False,
        softcap=True,
        window=True,
        unequal_dims=True,
    )

    def __init__(self, *, matrix_bfloat16: bool | None = None) -> None:
        """See `native_backend`, which builds and loads what this needs.

        Args:
            matrix_bfloat16: Multiply bfloat16 as it is; False widens it first. None asks the CPU:
                where it has no such instructions, they are emulated and slower than float32.
        """
        if matrix_bfloat16 is None:
            matrix_bfloat16 = bool({"avx512_bf16", "amx_bf16"} & cpu_features())
        self._matrix_bfloat16 = matrix_bfloat16

    def plan(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> Plan:
        """Lay the spans out for the operator."""
        assert device.type == "cpu"
        return NativePlan(spans, page_tokens, self._matrix_bfloat16)


class NativePlan:
    """One step's spans and page table."""

    def __init__(self, spans: Sequence[Span], page_tokens: int, matrix_bfloat16: bool) -> None:
        rows: list[tuple[int, int, int, int]] = []
        table: list[int] = []
        for span in spans:
            rows.append((span.first_row, span.tokens, span.start, len(table)))
            table.extend(span.page_ids[: -(-span.end // page_tokens)])
        self._spans = torch.tensor(rows)
        self._table = torch.tensor(table)
        self._matrix_bfloat16 = matrix_bfloat16
        self._attend: Callable[..., None] = torch.ops.pie.attend.default

    def attend(
        self,
        layer: int,  # noqa: ARG002
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,  # noqa: ARG002
        value: torch.Tensor,  # noqa: ARG002
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Plan.attend`."""
        self._attend(
            query,
            keys,
            values,
            out,
            self._spans,
            self._table,
            spec.scaling,
            spec.window or 0,
            spec.softcap or 0.0,
            self._matrix_bfloat16,
        )


def native_backend(cache_folder: Path) -> NativeBackend | None:
    """Return the backend, built where this host has not yet; None where it cannot be had.

    The build takes about ten seconds, once on a host. Safe to call from several processes at once.
    """
    global _loaded  # noqa: PLW0603
    with _loading:
        if _loaded is None:
            try:
                library = _library(cache_folder.expanduser())
                # A second library with the same operator, from another folder, aborts the process.
                if not hasattr(torch.ops.pie, "attend"):
                    torch.ops.load_library(library)  # type: ignore[no-untyped-call]
                _check(NativeBackend())
                _loaded = True
            except (OSError, RuntimeError, subprocess.SubprocessError, AssertionError) as error:
                log.warning("attention runs on torch, without the compiled kernel: %s", error)
                _loaded = False
        return NativeBackend() if _loaded else None


def _check(backend: NativeBackend) -> None:
    """Refuse a build that computes wrongly."""
    for case in conformance.CASES:
        if case.name in _CHECKED and case.dtype in backend.capabilities.dtypes:
            conformance.run(backend, case)


def _library(cache_folder: Path) -> Path:
    """Return the shared library for this source, compiler, torch and CPU, building it once."""
    compiler = shutil.which(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    if compiler is None:
        raise RuntimeError("there is no C++ compiler here (Debian: apt-get install g++)")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=30
    ).stdout
    about = [_SOURCE.read_bytes(), version, " ".join(sorted(cpu_features())).encode()]
    about += [torch.__version__.encode(), " ".join(_FLAGS).encode()]
    digest = blake3(b"".join(blake3(item).digest() for item in about)).hexdigest(8)
    library = cache_folder / "native" / f"attention-{digest}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(library.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Who holds the lock runs a compiler with a time limit, so this wait has one.
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not library.is_file():
            _build(compiler, library)
    finally:
        os.close(handle)
    return library


def _build(compiler: str, library: Path) -> None:
    log.info("compiling the attention kernel, once on this host")
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        made = Path(scratch, library.name)
        command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
        command += [f"-I{folder}" for folder in cpp_extension.include_paths()]
        # OpenMP comes with torch: a second copy would bring a second pool of threads.
        command += [f"-L{folder}" for folder in cpp_extension.library_paths()]
        command += ["-lc10", "-ltorch_cpu"]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_BUILD_TIMEOUT_S
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise RuntimeError(f"the compiler failed: {lines[0]}")
        made.replace(library)

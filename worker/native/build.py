"""Building the CPU kernels with the host's C++ compiler, once on a host.

Covers the library of `operators.cpp` and its headers, kept in the cache folder by a digest of all
that goes into it. Does not cover loading it or what is done where it cannot be had
(`pie.worker.attention.native`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from blake3 import blake3
from torch.utils import cpp_extension

from pie.worker.cpu import cpu_features

log = logging.getLogger("pie.worker.native")

_FOLDER = Path(__file__).parent
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


def build(cache_folder: Path) -> Path:
    """Return the shared library for these sources, compiler, torch and CPU, building it once.

    Safe to call from several processes at once.

    Raises:
        OSError: A file or a process failed.
        RuntimeError: There is no compiler, or it failed.
        subprocess.SubprocessError: The compiler did not end in time.
    """
    compiler = shutil.which(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    if compiler is None:
        raise RuntimeError("there is no C++ compiler here (Debian: apt-get install g++)")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=30
    ).stdout
    about = [one.read_bytes() for one in sorted(_FOLDER.iterdir()) if one.suffix in {".cpp", ".h"}]
    about += [version, " ".join(sorted(cpu_features())).encode()]
    about += [torch.__version__.encode(), " ".join(_FLAGS).encode()]
    digest = blake3(b"".join(blake3(item).digest() for item in about)).hexdigest(8)
    library = cache_folder / "native" / f"kernels-{digest}.so"
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(library.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # Who holds the lock runs a compiler with a time limit, so this wait has one.
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not library.is_file():
            _compile(compiler, library)
    finally:
        os.close(handle)
    return library


def _compile(compiler: str, library: Path) -> None:
    log.info("compiling the CPU kernels, once on this host")
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent) as scratch:
        made = Path(scratch, library.name)
        command = [compiler, *_FLAGS, str(_FOLDER / "operators.cpp"), "-o", str(made)]
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

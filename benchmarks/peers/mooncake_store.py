"""Mooncake Store beside Pie's pool: a master, a store in a process of its own, and a client.

`PIE_BENCH_MOONCAKE` names the folder of its environment, where it is installed if it is not there. The wheel
is linked to RDMA's libraries also where none is used: Debian's `libibverbs1` and `libcurl4`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_START_S = 20.0
_CASES_S = 120.0
_CONTESTANT = Path(__file__).with_name("mooncake_contestant.py")


def figures() -> dict[str, object] | str:
    """Return GB/s of puts and gets by page size, or why there are none."""
    folder = os.environ.get("PIE_BENCH_MOONCAKE", "")
    if not folder:
        return "not measured: PIE_BENCH_MOONCAKE names no folder"
    python = _python_of(Path(folder).expanduser().absolute())
    with _master(python) as master, _store(python, master):
        done = subprocess.run(
            [python, _CONTESTANT, "client", master],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_CASES_S,
            check=True,
        )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return {"version": _version(python), **found}


def _python_of(folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not (folder / "bin" / "mooncake_master").is_file():
        print(f"installing Mooncake into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        wanted = ["mooncake-transfer-engine-non-cuda", "numpy"]
        subprocess.run([*pip, "install", "-q", *wanted], check=True)
    return python


def _version(python: Path) -> str:
    name = "mooncake-transfer-engine-non-cuda"
    ask = f"import importlib.metadata as m; print(m.version({name!r}))"
    done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextlib.contextmanager
def _master(python: Path) -> Iterator[str]:
    with (
        socket.create_server(("127.0.0.1", 0)) as rpc,
        socket.create_server(("127.0.0.1", 0)) as web,
    ):
        ports = [one.getsockname()[1] for one in (rpc, web)]
    command: list[str | Path] = [
        *(python.with_name("mooncake_master"), "--rpc_port", str(ports[0])),
        *("--metrics_port", str(ports[1])),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(ports[0], process)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _store(python: Path, master: str) -> Iterator[None]:
    process = subprocess.Popen(
        [python, _CONTESTANT, "store", master],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        while (line := process.stdout.readline()).strip() != "ready":
            if not line:
                raise SystemExit(
                    "Mooncake's store did not start: are libibverbs1 and libcurl4 there?"
                )
        yield
    finally:
        process.kill()
        process.communicate()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        time.sleep(0.05)
    raise RuntimeError("Mooncake's master did not start: are libibverbs1 and libcurl4 there?")

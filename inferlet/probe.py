"""Which limits of a program's process hold on this host, tried: `python -m pie.inferlet.probe LIMITS`.

Covers confining a process as a program's is, and trying what a program must not be able to do. Does not cover
who asks (`pie.cluster.doctor`). Prints JSON: names of the parts that the kernel took, and for each attempt
whether it was kept from.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from pie.inferlet.confine import ProcessLimits, confine


class Probed(msgspec.Struct, frozen=True):
    """What was found."""

    parts: tuple[str, ...]
    """Of `rlimits`, `landlock` and `seccomp`."""
    kept: dict[str, bool]
    """By what a program must not do, whether it cannot."""


def main() -> None:
    """Confine this process, try, and print what was found."""
    limits = msgspec.json.decode(sys.argv[1], type=ProcessLimits)
    parts = confine(limits)
    kept = {name: _kept(attempt) for name, attempt in _attempts(limits).items()}
    kept["more CPU time"] = resource.getrlimit(resource.RLIMIT_CPU)[0] == limits.cpu_s
    sys.stdout.write(msgspec.json.encode(Probed(parts, kept)).decode())
    sys.stdout.flush()


def _attempts(limits: ProcessLimits) -> dict[str, Callable[[], object]]:
    raised = 2 * limits.memory_bytes
    return {
        "memory beyond its limit": lambda: bytearray(limits.memory_bytes),
        "more open files": lambda: _open(limits.open_files),
        "new processes": _fork,
        "reading files": lambda: next(Path("/etc").iterdir()),
        "writing files": _write,
        "network": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM).close(),
        "sockets of this host": lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close(),
        "signals to others": lambda: os.kill(os.getppid(), 0),
        "raising its limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (raised, raised)),
    }


def _kept(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError, MemoryError):
        return True
    return False


def _open(files: int) -> None:
    opened: list[int] = []
    try:
        while len(opened) < files:
            opened.append(os.dup(1))
    finally:
        # What is tried next must not fail for want of one.
        for one in opened:
            os.close(one)


def _fork() -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)


def _write() -> None:
    folder = Path(f"/tmp/pie-probe-{os.getpid()}")  # noqa: S108 - it must not come about
    folder.mkdir()
    folder.rmdir()


if __name__ == "__main__":
    main()

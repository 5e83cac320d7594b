"""Which limits of a program's process hold on this host, tried: `python -m pie.inferlet.probe LIMITS`.

Covers confining a process as a program's is, and trying what a program must not be able to do. Does not cover
who asks (`pie.cluster.doctor`). Prints JSON: names of the parts that the kernel took, and for each attempt
whether it was kept from.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from pie.inferlet.confine import ProcessLimits, confine

_PR_SET_PDEATHSIG = 1
_IPC_RMID = 0


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
        "datagrams to sockets of this host": lambda: _close(
            socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        ),
        "signals to others": lambda: os.kill(os.getppid(), 0),
        "signals by way of sockets": _own_signals,
        "how other processes are scheduled": _schedule,
        "outliving its worker": lambda: _call("prctl", _PR_SET_PDEATHSIG, 0, 0, 0, 0),
        "shared memory": lambda: _remove(
            "shmctl", _call("shmget", 0, ctypes.c_size_t(4096), 0o600)
        ),
        "memory outside its address space": lambda: os.close(os.memfd_create("probe")),
        "message queues": lambda: _remove("msgctl", _call("msgget", 0, 0o600)),
        "semaphores": lambda: _remove("semctl", _call("semget", 0, 1, 0o600)),
        "changing files' modes": _change_mode,
        "watching files": lambda: os.close(_call("inotify_init1", 0)),
        "raising its limits": lambda: resource.setrlimit(resource.RLIMIT_AS, (raised, raised)),
        "powers of root": lambda: os.setgroups(os.getgroups()),
    }


def _kept(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError, MemoryError):
        return True
    return False


def _call(name: str, *arguments: object) -> int:
    """Call the C library."""
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return result


def _remove(name: str, number: int) -> None:
    if name == "semctl":
        _call(name, number, 0, _IPC_RMID)
    else:
        _call(name, number, _IPC_RMID, None)


def _close(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        one.close()


def _own_signals() -> None:
    one, other = socket.socketpair()
    try:
        fcntl.fcntl(one, fcntl.F_SETOWN, os.getppid())
    finally:
        _close((one, other))


def _schedule() -> None:
    """Schedule the parent as it is."""
    parent = os.getppid()
    os.sched_setscheduler(parent, os.sched_getscheduler(parent), os.sched_getparam(parent))


def _change_mode() -> None:
    """Give a file that may be read the mode that it has."""
    here = Path(__file__)
    here.chmod(stat.S_IMODE(here.stat().st_mode))


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

"""Makes system calls from a confined process; for tests. Prints JSON.

For every call of the filter its error with arguments that name nothing; then what a program must not be able to
do with calls that it may make, and what it must.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from pie.inferlet.confine import ProcessLimits, confine
from pie.inferlet.system_calls import numbers_of

_NOTHING = -1
_GETPPID_ONLY = ("kill", "tgkill")
"""With -1 they would mean everybody."""


def main() -> None:
    parent, folder = os.getppid(), sys.argv[1]
    held = confine(ProcessLimits(1 << 30, 30, 64))
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number: int, *arguments: int) -> str:
        ctypes.set_errno(0)
        got = libc.syscall(number, *(ctypes.c_long(one) for one in arguments))
        if got == 0 and number in forks:
            os._exit(0)  # only where the filter is not in force
        return "went" if got >= 0 else errno.errorcode[ctypes.get_errno()]

    numbers = numbers_of(platform.machine())
    forks = {number for name, number in numbers.items() if name in ("fork", "vfork", "clone")}
    refused = {
        name: call(number, parent if name in _GETPPID_ONLY else _NOTHING, *[_NOTHING] * 5)
        for name, number in numbers.items()
        if name not in ("clone", "vfork", "open", "openat")
    }
    refused |= {name: call(numbers[name], 17) for name in ("clone", "vfork") if name in numbers}

    def option(number: int, *arguments: int) -> None:
        if libc.prctl(number, *arguments, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl")

    one, other = socket.socketpair()
    owner = struct.pack("<i", parent)
    kept: dict[str, Callable[[], object]] = {
        "clearing the death signal": lambda: option(1, 0),
        "being looked into": lambda: option(4, 1),
        "another's tracing": lambda: option(0x59616D61, parent),
        "adopting processes": lambda: option(36, 1),
        "owner of a socket's signals": lambda: fcntl.fcntl(one, fcntl.F_SETOWN, parent),
        "signal of a socket": lambda: fcntl.fcntl(one, 10, 9),
        "extended owner": lambda: fcntl.fcntl(one, 15, struct.pack("<ii", 1, parent)),
        "lease": lambda: fcntl.fcntl(one, 1024, 0),
        "owner by ioctl": lambda: fcntl.ioctl(one, 0x8901, owner),
        "group by ioctl": lambda: fcntl.ioctl(one, 0x8902, owner),
        "typing for others": lambda: fcntl.ioctl(0, termios.TIOCSTI, b"x"),
        "datagrams": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "packets": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
        "pairs of another kind": lambda: socket.socketpair(socket.AF_INET, socket.SOCK_STREAM),
        "writing a device": lambda: os.open("/dev/null", os.O_WRONLY),
        "making a file": lambda: os.open(f"{folder}/made", os.O_CREAT | os.O_RDONLY),
        "emptying a file": lambda: os.open(f"{folder}/there", os.O_TRUNC | os.O_RDONLY),
        "reading a file": lambda: os.open(f"{folder}/there", os.O_RDONLY),
        "what else is on Python's path": lambda: [
            list(entry.iterdir()) for entry in (Path.cwd(), Path(__file__).parents[2])
        ],
        "a file on Python's path": (Path(__file__).parents[2] / "README.md").read_text,
        "mode of a file": lambda: Path(f"{folder}/there").chmod(0o777),
        "times of a file": lambda: os.utime(f"{folder}/there"),
        "becoming another": lambda: os.setresuid(65534, 65534, 65534),
        "another's affinity": lambda: os.sched_setaffinity(parent, {0}),
        "limits of another": lambda: subprocess.run(["true"], check=False),
    }

    def threads() -> None:
        ran = threading.Thread(target=lambda: option(15, ctypes.addressof(name)))
        ran.start()
        ran.join()

    def pair() -> None:
        one.setblocking(False)
        os.set_inheritable(one.fileno(), True)
        other.send(b"x")
        assert one.dup().recv(1) == b"x"
        assert not os.isatty(one.fileno())

    name = ctypes.create_string_buffer(b"named")
    can: dict[str, Callable[[], object]] = {
        "threads with names": threads,
        "a pair of streams": pair,
        "an event loop": lambda: asyncio.run(asyncio.sleep(0)),
        "a thread of the loop": lambda: asyncio.run(asyncio.to_thread(len, "")),
        "reading Python's files": lambda: Path(os.__file__).read_text(),
        "randomness": lambda: os.urandom(8),
        "signals to itself": lambda: os.kill(os.getpid(), 0),
    }
    told = {what: _went(attempt) for what, attempt in (kept | can).items()}
    json.dump({"held": held, "refused": refused, "kept": list(kept), "told": told}, sys.stdout)


def _went(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (OSError, ValueError):
        return False
    return True


if __name__ == "__main__":
    main()

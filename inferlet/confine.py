"""What a program's process may do, set by the process itself before it runs a line of the program.

Covers resource limits, what root may do, Landlock (files and TCP), putting the filter of system calls in force,
and what to do when the parent dies. Does not cover which calls that filter refuses
(`pie.inferlet.system_calls`) or limits that the host keeps from outside: wall time, output, pages
(`pie.worker.programs.process`). What all of this promises, and what not: docs/security.md.

Each part is used where the kernel permits it; `confine` returns the names of those that hold. Nothing here can
be taken back by the program: limits are hard ones, both Landlock and seccomp only ever narrow, and the
filter refuses what would undo the rest.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
from pathlib import Path

import msgspec

from pie.inferlet.system_calls import seccomp_filter

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION = 0x2008_0522
_CAP_DAC_READ_SEARCH = 2


class ProcessLimits(msgspec.Struct, frozen=True):
    """What one program's process may take."""

    memory_bytes: int
    """Address space."""
    cpu_s: int
    open_files: int


class NotConfined(Exception):  # noqa: N818
    """This process must not run a program."""


def confine(limits: ProcessLimits) -> tuple[str, ...]:
    """Confine this process for good; return what holds: `rlimits`, `landlock`, `seccomp`.

    Call it after all modules that are in unusual places are imported.

    Raises:
        NotConfined: There are other threads, which would go on as they are: what confines, confines one.
    """
    if (threads := len(list(Path("/proc/self/task").iterdir()))) > 1:
        raise NotConfined(
            f"a process of {threads} threads cannot be confined: only one of them would be"
        )
    libc = ctypes.CDLL(None, use_errno=True)
    _give_up_root(libc)
    # Ends with its parent, and nobody may look into it.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _limit(limits)
    held = ["rlimits"]
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0:
        if _landlock(libc):
            held.append("landlock")
        if _seccomp(libc):
            held.append("seccomp")
    return tuple(held)


def _limit(limits: ProcessLimits) -> None:
    for what, value in (
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(what, (value, value))
    # SIGXCPU first, which says why. Who ignores it is ended by its host, and by SIGKILL where there is none.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 5))


def _give_up_root(libc: ctypes.CDLL) -> None:
    """Keep no capability of root's but reading, which Landlock limits: Python may be another user's."""
    header = struct.pack("<Ii", _CAPABILITY_VERSION, 0)
    held = ctypes.create_string_buffer(24)  # effective, permitted and inheritable, twice
    if libc.capget(header, held) != 0:
        return
    permitted = struct.unpack("<6I", held.raw)[1] & 1 << _CAP_DAC_READ_SEARCH
    libc.capset(header, struct.pack("<6I", permitted, permitted, 0, 0, 0, 0))


# Landlock: https://docs.kernel.org/userspace-api/landlock.html

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RULE_PATH_BENEATH = 1
_FS_EXECUTE, _FS_READ_FILE, _FS_READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files each version of the interface knows."""
_NET_BIND_CONNECT = 0b11
_SCOPED = 0b11  # abstract sockets and signals beyond this process
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_PACKAGE_FOLDERS = ("site-packages", "dist-packages")
_READABLE = ("/usr/lib", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/urandom", "/dev/null")


def _landlock(libc: ctypes.CDLL) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return False
    rights = (1 << _FS_RIGHTS[min(version, 5)]) - 1
    attributes = struct.pack("<Q", rights)
    if version >= 4:
        attributes += struct.pack("<Q", _NET_BIND_CONNECT)
    if version >= 6:
        attributes += struct.pack("<Q", _SCOPED)
    ruleset = libc.syscall(_LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        return False
    try:
        for path in _python_paths():
            _allow_reading(libc, ruleset, path)
        return bool(libc.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _allow_reading(libc: ctypes.CDLL, ruleset: int, path: Path) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    rights = _FS_READ_FILE | (_FS_READ_DIR | _FS_EXECUTE if path.is_dir() else 0)
    rule = struct.pack("<Qi", rights, handle)
    libc.syscall(_LANDLOCK_ADD, ruleset, _RULE_PATH_BENEATH, rule, 0)
    os.close(handle)


def _python_paths() -> list[Path]:
    """Return where Python and its libraries are, which a program may read and nothing else.

    Of `sys.path` that is what is known to hold libraries alone: anything may be on it, such as the folder in which
    a cluster was started. Of what else it holds, the packages that are imported by now.
    """
    found = {Path(sysconfig.get_path(name)) for name in _LIBRARIES}
    found |= {Path(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix)}
    found |= {Path(entry) for entry in sys.path if Path(entry).name in _PACKAGE_FOLDERS}
    found |= {Path(entry) for entry in _READABLE}
    for name, module in list(sys.modules.items()):
        # Where Pie itself is a source tree, its packages are found by links or by a finder.
        if "." not in name or name.split(".")[0] == "pie":
            places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
            found |= {Path(place) for place in places if place}
            found |= {Path(f"{place}.libs") for place in places if place}
    return sorted({path.resolve() for path in found if path.exists()})


def _seccomp(libc: ctypes.CDLL) -> bool:
    program = seccomp_filter(platform.machine(), os.getpid())
    if program is None:
        return False
    code = ctypes.create_string_buffer(program, len(program))
    # `struct sock_fprog`: a count, and after padding a pointer.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    held = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0
    return bool(held)

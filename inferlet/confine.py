"""What a program's process may do, set by the process itself before it runs a line of the program.

Covers resource limits, Landlock (files and TCP), seccomp (processes, sockets, other processes) and what to
do when the parent dies. Does not cover limits that the host keeps from outside: wall time, output, pages
(`pie.worker.programs.process`). What all of this promises, and what not: docs/security.md.

Each part is used where the kernel permits it; `confine` returns the names of those that hold. Nothing here can
be taken back by the program: limits are hard ones, and both Landlock and seccomp only ever narrow.
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

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_EPERM, _ENOSYS = 1, 38
_CLONE_THREAD = 0x0001_0000


class ProcessLimits(msgspec.Struct, frozen=True):
    """What one program's process may take."""

    memory_bytes: int
    """Address space."""
    cpu_s: int
    open_files: int


def confine(limits: ProcessLimits) -> tuple[str, ...]:
    """Confine this process for good; return what holds: `rlimits`, `landlock`, `seccomp`.

    Call it before any thread is started, and after all modules that are in unusual places are imported.
    """
    libc = ctypes.CDLL(None, use_errno=True)
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
    # SIGXCPU first, which says why; SIGKILL a second later, for who ignores it.
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))


# Landlock: https://docs.kernel.org/userspace-api/landlock.html

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_RULE_PATH_BENEATH = 1
_FS_EXECUTE, _FS_READ_FILE, _FS_READ_DIR = 1 << 0, 1 << 2, 1 << 3
_FS_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files each version of the interface knows."""
_NET_BIND_CONNECT = 0b11
_SCOPED = 0b11  # abstract sockets and signals beyond this process
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
    """Return where Python and its libraries are, which a program may read and nothing else."""
    found = {Path(entry) for entry in sys.path if entry}
    found |= {Path(entry) for entry in sysconfig.get_paths().values()}
    # Where Pie itself is a source tree, its packages are found by links or by a finder.
    found |= {
        Path(place)
        for name, module in list(sys.modules.items())
        if name.split(".")[0] == "pie"
        for place in getattr(module, "__path__", ())
    }
    found |= {Path(entry) for entry in _READABLE}
    return sorted({path.resolve() for path in found if path.exists()})


# seccomp: https://docs.kernel.org/userspace-api/seccomp_filter.html

_ARCHITECTURES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
_NUMBERS = {
    "x86_64": {
        "connect": 42, "accept": 43, "bind": 49, "listen": 50, "socket": 41, "fork": 57, "vfork": 58,
        "execve": 59, "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "accept4": 288, "setrlimit": 160, "unshare": 272, "setns": 308, "process_vm_readv": 310,
        "process_vm_writev": 311, "execveat": 322, "bpf": 321, "perf_event_open": 298,
        "userfaultfd": 323, "keyctl": 250, "add_key": 248, "request_key": 249,
        "open_by_handle_at": 304, "init_module": 175, "finit_module": 313, "reboot": 169,
        "swapon": 167, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "tkill": 200,
        "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425,
        "setpriority": 141, "sched_setaffinity": 203, "clone": 56, "clone3": 435, "kill": 62,
        "tgkill": 234, "prlimit64": 302,
    },
    "aarch64": {
        "connect": 203, "accept": 202, "bind": 200, "listen": 201, "socket": 198, "execve": 221,
        "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "accept4": 242,
        "setrlimit": 164, "unshare": 97, "setns": 268, "process_vm_readv": 270,
        "process_vm_writev": 271, "execveat": 281, "bpf": 280, "perf_event_open": 241,
        "userfaultfd": 282, "keyctl": 219, "add_key": 217, "request_key": 218,
        "open_by_handle_at": 265, "init_module": 105, "finit_module": 273, "reboot": 142,
        "swapon": 224, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "tkill": 130,
        "pidfd_open": 434, "pidfd_getfd": 438, "pidfd_send_signal": 424, "io_uring_setup": 425,
        "setpriority": 140, "sched_setaffinity": 122, "clone": 220, "clone3": 435, "kill": 129,
        "tgkill": 131, "prlimit64": 261,
    },
}  # fmt: skip
_CHECKED = ("clone", "clone3", "kill", "tgkill", "prlimit64")
"""Forbidden only with some arguments."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_X32 = 0x4000_0000


def _seccomp(libc: ctypes.CDLL) -> bool:
    machine = platform.machine()
    if machine not in _ARCHITECTURES:
        return False
    program = _filter(machine, os.getpid())
    code = ctypes.create_string_buffer(program)
    # `struct sock_fprog`: a count, and after padding a pointer.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    held = libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0
    return bool(held)


def _filter(machine: str, pid: int) -> bytes:
    """Return the filter as BPF: everything is allowed but what is named here."""
    numbers = _NUMBERS[machine]
    steps: list[bytes] = []

    def step(code: int, value: int, yes: int = 0, no: int = 0) -> None:
        steps.append(struct.pack("<HBBI", code, yes, no, value))

    def when(number: int, body: list[tuple[int, int, int, int]]) -> None:
        """Run `body`, which returns, for one system call."""
        step(_EQUAL, number, 0, len(body))
        for one in body:
            step(*one)

    refuse = (_RETURN, _ERROR | _EPERM, 0, 0)
    allow = (_RETURN, _ALLOW, 0, 0)
    step(_LOAD, 4)
    step(_EQUAL, _ARCHITECTURES[machine], 1, 0)
    step(_RETURN, _KILL)
    step(_LOAD, 0)
    if machine == "x86_64":  # numbers of the x32 interface name the same calls again
        step(_ANY_BIT, _X32, 0, 1)
        step(_RETURN, _ERROR | _EPERM)
    for name, number in numbers.items():
        if name not in _CHECKED:
            when(number, [refuse])
    # Threads, but no processes; libraries fall back from clone3, whose flags cannot be seen.
    when(numbers["clone3"], [(_RETURN, _ERROR | _ENOSYS, 0, 0)])
    when(numbers["clone"], [(_LOAD, 16, 0, 0), (_ANY_BIT, _CLONE_THREAD, 0, 1), allow, refuse])
    for name in ("kill", "tgkill"):  # itself alone
        when(numbers[name], [(_LOAD, 16, 0, 0), (_EQUAL, pid, 0, 1), allow, refuse])
    # Reading one's own limits: first argument 0, no new limit.
    when(
        numbers["prlimit64"],
        [
            (_LOAD, 16, 0, 0),
            (_EQUAL, 0, 0, 5),
            (_LOAD, 32, 0, 0),
            (_EQUAL, 0, 0, 3),
            (_LOAD, 36, 0, 0),
            (_EQUAL, 0, 0, 1),
            allow,
            refuse,
        ],
    )
    step(*allow)
    return b"".join(steps)

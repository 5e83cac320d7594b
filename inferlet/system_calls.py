"""Which system calls a program's process may not make, as a seccomp filter.

Covers what is refused, and some calls' arguments. Does not cover files that may be read and TCP
(`pie.inferlet.confine`, by Landlock). https://docs.kernel.org/userspace-api/seccomp_filter.html

All is allowed but what is named here: whatever acts on other processes, on files other than by reading, or
outlives the process, and whatever would undo what confines it. Calls that do much behind one number (`prctl`,
`fcntl`, `ioctl`) are the other way round: what Python needs is allowed. Numbers are from Linux's
`unistd_64.h` (x86-64) and `asm-generic/unistd.h` (arm64).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

_REFUSED = (
    # Sockets with a name, and what comes of them.
    "socket",
    "bind",
    "connect",
    "listen",
    "accept",
    "accept4",
    # New processes and programs.
    "fork",
    "vfork",
    "execve",
    "execveat",
    "setsid",
    "setpgid",
    # Other processes: their memory, files, names and how they run.
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "process_mrelease",
    "pidfd_open",
    "pidfd_getfd",
    "kcmp",
    "migrate_pages",
    "move_pages",
    "setpriority",
    "sched_setaffinity",
    "sched_setparam",
    "sched_setscheduler",
    "sched_setattr",
    "ioprio_set",
    # Signals to others.
    "tkill",
    "rt_sigqueueinfo",
    "rt_tgsigqueueinfo",
    "pidfd_send_signal",
    # Memory, queues and keys that outlive their process or are outside its address space.
    "shmget",
    "shmat",
    "shmctl",
    "semget",
    "semop",
    "semtimedop",
    "semctl",
    "msgget",
    "msgsnd",
    "msgrcv",
    "msgctl",
    "mq_open",
    "mq_unlink",
    "memfd_create",
    "memfd_secret",
    "add_key",
    "request_key",
    "keyctl",
    # Files: their content where Landlock is not, their modes, owners and times where it is.
    "creat",
    "truncate",
    "mkdir",
    "mkdirat",
    "mknod",
    "mknodat",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "rename",
    "renameat",
    "renameat2",
    "rmdir",
    "unlink",
    "unlinkat",
    "chmod",
    "fchmod",
    "fchmodat",
    "fchmodat2",
    "chown",
    "fchown",
    "lchown",
    "fchownat",
    "setxattr",
    "lsetxattr",
    "fsetxattr",
    "setxattrat",
    "removexattr",
    "lremovexattr",
    "fremovexattr",
    "removexattrat",
    "utime",
    "utimes",
    "futimesat",
    "utimensat",
    "file_setattr",
    "open_by_handle_at",
    # Watching files, whether they may be read or not.
    "inotify_init",
    "inotify_init1",
    "fanotify_init",
    # The kernel's own, and what all processes share.
    "setrlimit",
    "sync",
    "syncfs",
    "io_setup",
    "io_uring_setup",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "mount",
    "umount2",
    "pivot_root",
    "chroot",
    "open_tree",
    "move_mount",
    "fsopen",
    "fsmount",
    "mount_setattr",
    "unshare",
    "setns",
    "init_module",
    "finit_module",
    "delete_module",
    "kexec_load",
    "kexec_file_load",
    "reboot",
    "swapon",
    "swapoff",
    "acct",
    "fspick",
    "quotactl",
    "vhangup",
    "settimeofday",
    "clock_settime",
    "clock_adjtime",
    "adjtimex",
    "sethostname",
    "setdomainname",
    "syslog",
    # Memory that nobody else can have.
    "mlock",
    "mlock2",
    "mlockall",
)

_NUMBERS = {
    "x86_64": {
        "socket": 41, "bind": 49, "connect": 42, "listen": 50, "accept": 43, "accept4": 288,
        "fork": 57, "vfork": 58, "execve": 59, "execveat": 322, "setsid": 112, "setpgid": 109,
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "process_madvise": 440,
        "process_mrelease": 448, "pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 312,
        "migrate_pages": 256, "move_pages": 279, "setpriority": 141, "sched_setaffinity": 203,
        "sched_setparam": 142, "sched_setscheduler": 144, "sched_setattr": 314, "ioprio_set": 251,
        "tkill": 200, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297, "pidfd_send_signal": 424,
        "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64, "semop": 65, "semtimedop": 220,
        "semctl": 66, "msgget": 68, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "mq_open": 240,
        "mq_unlink": 241, "memfd_create": 319, "memfd_secret": 447, "add_key": 248,
        "request_key": 249, "keyctl": 250, "creat": 85, "truncate": 76, "mkdir": 83, "mkdirat": 258,
        "mknod": 133, "mknodat": 259, "link": 86, "linkat": 265, "symlink": 88, "symlinkat": 266,
        "rename": 82, "renameat": 264, "renameat2": 316, "rmdir": 84, "unlink": 87, "unlinkat": 263,
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "fchown": 93,
        "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190,
        "setxattrat": 463, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "removexattrat": 466, "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "file_setattr": 469, "open_by_handle_at": 304, "inotify_init": 253, "inotify_init1": 294,
        "fanotify_init": 300, "setrlimit": 160, "sync": 162, "syncfs": 306, "io_setup": 206,
        "io_uring_setup": 425, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "mount": 165,
        "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428, "move_mount": 429,
        "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "unshare": 272, "setns": 308,
        "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246,
        "kexec_file_load": 320, "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163,
        "fspick": 433, "quotactl": 179, "vhangup": 153, "settimeofday": 164, "clock_settime": 227,
        "clock_adjtime": 305, "adjtimex": 159, "sethostname": 170, "setdomainname": 171,
        "syslog": 103, "mlock": 149, "mlock2": 325, "mlockall": 151,
        "clone": 56, "clone3": 435, "kill": 62, "tgkill": 234, "prlimit64": 302, "prctl": 157,
        "fcntl": 72, "ioctl": 16, "socketpair": 53, "open": 2, "openat": 257, "openat2": 437,
    },
    "aarch64": {
        "socket": 198, "bind": 200, "connect": 203, "listen": 201, "accept": 202, "accept4": 242,
        "execve": 221, "execveat": 281, "setsid": 157, "setpgid": 154, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "process_madvise": 440,
        "process_mrelease": 448, "pidfd_open": 434, "pidfd_getfd": 438, "kcmp": 272,
        "migrate_pages": 238, "move_pages": 239, "setpriority": 140, "sched_setaffinity": 122,
        "sched_setparam": 118, "sched_setscheduler": 119, "sched_setattr": 274, "ioprio_set": 30,
        "tkill": 130, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "pidfd_send_signal": 424,
        "shmget": 194, "shmat": 196, "shmctl": 195, "semget": 190, "semop": 193, "semtimedop": 192,
        "semctl": 191, "msgget": 186, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "mq_open": 180,
        "mq_unlink": 181, "memfd_create": 279, "memfd_secret": 447, "add_key": 217,
        "request_key": 218, "keyctl": 219, "truncate": 45, "mkdirat": 34, "mknodat": 33, "linkat": 37,
        "symlinkat": 36, "renameat": 38, "renameat2": 276, "unlinkat": 35, "fchmod": 52,
        "fchmodat": 53, "fchmodat2": 452, "fchown": 55, "fchownat": 54, "setxattr": 5, "lsetxattr": 6,
        "fsetxattr": 7, "setxattrat": 463, "removexattr": 14, "lremovexattr": 15, "fremovexattr": 16,
        "removexattrat": 466, "utimensat": 88, "file_setattr": 469, "open_by_handle_at": 265,
        "inotify_init1": 26, "fanotify_init": 262, "setrlimit": 164, "sync": 81, "syncfs": 267,
        "io_setup": 0, "io_uring_setup": 425, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282,
        "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsmount": 432, "mount_setattr": 442, "unshare": 97,
        "setns": 268, "init_module": 105, "finit_module": 273, "delete_module": 106,
        "kexec_load": 104, "kexec_file_load": 294, "reboot": 142, "swapon": 224, "swapoff": 225,
        "fspick": 433, "quotactl": 60, "vhangup": 58, "settimeofday": 170, "clock_settime": 112,
        "clock_adjtime": 266, "adjtimex": 171, "sethostname": 161, "setdomainname": 162,
        "syslog": 116, "mlock": 228, "mlock2": 284, "mlockall": 230,
        "acct": 89, "clone": 220, "clone3": 435, "kill": 129, "tgkill": 131, "prlimit64": 261,
        "prctl": 167, "fcntl": 25, "ioctl": 29, "socketpair": 199, "openat": 56, "openat2": 437,
    },
}  # fmt: skip

_MACHINES = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}

_CLONE_THREAD = 0x0001_0000
_CLONE_NEW = 0x7E02_0000
"""Flags that ask for a namespace."""
_OPEN_TO_CHANGE = 0o1 | 0o2 | 0o100 | 0o1000
"""`O_WRONLY`, `O_RDWR`, `O_CREAT` and `O_TRUNC`."""
_UNIX, _STREAM, _TYPE_BITS = 1, 1, 0xF
PRCTL = (2, 3, 15, 16, 23, 0x5356_4D41)
"""`GET_PDEATHSIG`, `GET_DUMPABLE`, `SET_NAME`, `GET_NAME`, `CAPBSET_READ`, `SET_VMA`."""
FCNTL = (0, 1, 2, 3, 4, 1030)
"""`F_DUPFD`, `F_GETFD`, `F_SETFD`, `F_GETFL`, `F_SETFL`, `F_DUPFD_CLOEXEC`."""
IOCTL = (0x5401, 0x802C_542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""`TCGETS`, `TCGETS2`, `TIOCGWINSZ`, `FIONREAD`, `FIONBIO`, `FIONCLEX`, `FIOCLEX`."""

_LOAD, _EQUAL, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x45, 0x54, 0x06
_NUMBER_AT, _MACHINE_AT = 0, 4
_FIRST, _SECOND, _THIRD = 16, 24, 32
"""Where the lower halves of arguments are: the kernel reads no more of those that are looked at."""
_EPERM, _ENOSYS = 1, 38
_X32 = 0x4000_0000

_Step: TypeAlias = tuple[int, int, int, int]
"""A code, its value, and how many steps to leave out where a comparison holds and where not."""
_ALLOW: _Step = (_RETURN, 0x7FFF_0000, 0, 0)
_REFUSE: _Step = (_RETURN, 0x0005_0000 | _EPERM, 0, 0)
_UNKNOWN: _Step = (_RETURN, 0x0005_0000 | _ENOSYS, 0, 0)
_KILL: _Step = (_RETURN, 0x8000_0000, 0, 0)


def numbers_of(machine: str) -> dict[str, int]:
    """Return the numbers of all calls that are refused, always or with some arguments."""
    return dict(_NUMBERS.get(machine, {}))


def seccomp_filter(machine: str, pid: int) -> bytes | None:
    """Return the filter as BPF, for one process; None where the machine's calls are not known.

    Args:
        machine: Such as `x86_64`, of `platform.machine()`.
        pid: The process, which may send itself signals.
    """
    if machine not in _MACHINES:
        return None
    numbers = _NUMBERS[machine]
    steps: list[_Step] = [
        (_LOAD, _MACHINE_AT, 0, 0),
        (_EQUAL, _MACHINES[machine], 1, 0),
        _KILL,
        (_LOAD, _NUMBER_AT, 0, 0),
    ]
    if machine == "x86_64":  # numbers of the x32 interface name the same calls again
        steps += [(_ANY_BIT, _X32, 0, 1), _REFUSE]
    bodies: dict[str, Sequence[_Step]] = dict.fromkeys(_REFUSED, (_REFUSE,))
    bodies |= _with_arguments(pid)
    for name, body in bodies.items():
        if name in numbers:
            steps += [(_EQUAL, numbers[name], 0, len(body)), *body]
    steps.append(_ALLOW)
    return b"".join(struct.pack("<HBBI", code, yes, no, value) for code, value, yes, no in steps)


def _with_arguments(pid: int) -> dict[str, Sequence[_Step]]:
    """Return what is done about calls that are refused with some arguments; each ends by returning."""
    to_itself = ((_LOAD, _FIRST, 0, 0), (_EQUAL, pid, 1, 0), _REFUSE, _ALLOW)
    return {
        # Threads, but no processes; libraries fall back from clone3, whose flags cannot be seen.
        "clone3": (_UNKNOWN,),
        "clone": (
            (_LOAD, _FIRST, 0, 0),
            (_ANY_BIT, _CLONE_NEW, 1, 0),
            (_ANY_BIT, _CLONE_THREAD, 1, 0),
            _REFUSE,
            _ALLOW,
        ),
        "kill": to_itself,
        "tgkill": to_itself,
        # Reading one's own limits: first argument 0, no new limit.
        "prlimit64": (
            (_LOAD, _FIRST, 0, 0),
            (_EQUAL, 0, 0, 4),
            (_LOAD, _THIRD, 0, 0),
            (_EQUAL, 0, 0, 2),
            (_LOAD, _THIRD + 4, 0, 0),
            (_EQUAL, 0, 1, 0),
            _REFUSE,
            _ALLOW,
        ),
        # A pair of datagram sockets could be sent from to any socket with a name.
        "socketpair": (
            (_LOAD, _FIRST, 0, 0),
            (_EQUAL, _UNIX, 0, 3),
            (_LOAD, _SECOND, 0, 0),
            (_AND, _TYPE_BITS, 0, 0),
            (_EQUAL, _STREAM, 1, 0),
            _REFUSE,
            _ALLOW,
        ),
        "open": _unless(_SECOND, _OPEN_TO_CHANGE),
        "openat": _unless(_THIRD, _OPEN_TO_CHANGE),
        "openat2": (_UNKNOWN,),
        "prctl": _one_of(_FIRST, PRCTL),
        "fcntl": _one_of(_SECOND, FCNTL),
        "ioctl": _one_of(_SECOND, IOCTL),
    }


def _unless(at: int, bits: int) -> Sequence[_Step]:
    return ((_LOAD, at, 0, 0), (_ANY_BIT, bits, 0, 1), _REFUSE, _ALLOW)


def _one_of(at: int, values: Sequence[int]) -> Sequence[_Step]:
    steps: list[_Step] = [(_LOAD, at, 0, 0)]
    steps += [(_EQUAL, value, len(values) - n, 0) for n, value in enumerate(values)]
    return (*steps, _REFUSE, _ALLOW)

"""`pie doctor`: which limits of users' programs hold on this host.

Covers trying them in a process that is confined as a program's is, and telling what came of it. Does not cover
the limits themselves (`pie.inferlet.confine`).
"""

from __future__ import annotations

import subprocess
import sys

import msgspec
from rich.console import Console

from pie.cluster.errors import ClusterError
from pie.cluster.printing import new_table
from pie.inferlet.confine import ProcessLimits
from pie.inferlet.probe import Probed
from pie.worker.programs.process import program_environment
from pie.worker.settings import ProgramSettings

_PARTS = {
    "rlimits": "resource limits",
    "landlock": "Landlock (Linux 5.13 and later)",
    "seccomp": "seccomp (x86-64 and arm64)",
}
_LIMIT_S = 60.0


class DoctorError(ClusterError):
    """It could not be tried."""


def examine(settings: ProgramSettings) -> Probed:
    """Try the limits of programs in a process of its own.

    Raises:
        DoctorError: It did not say what it found.
    """
    limits = ProcessLimits(int(settings.memory), settings.cpu_s, settings.open_files)
    command = [sys.executable, "-P", "-m", "pie.inferlet.probe"]
    try:
        done = subprocess.run(
            [*command, msgspec.json.encode(limits).decode()],
            env=program_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DoctorError(f"a confined process took more than {_LIMIT_S:g} s") from error
    try:
        return msgspec.json.decode(done.stdout, type=Probed)
    except msgspec.DecodeError as error:
        why = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise DoctorError(
            f"a confined process failed: {''.join(why) or done.returncode}"
        ) from error


def show_examined(found: Probed, console: Console) -> bool:
    """Print what was found; return whether everything holds."""
    table = new_table("programs (inferlets) on this host", "", left=("",))
    for part, name in _PARTS.items():
        table.add_row(name, "holds" if part in found.parts else "NOT HERE")
    for name, is_kept in found.kept.items():
        table.add_row(f"  kept from: {name}", "yes" if is_kept else "NO")
    console.print(table)
    holds = all(found.kept.values())
    if not holds:
        console.print(
            "What is not kept from programs here, they can do: run those of people whom you trust, or "
            "put a sandboxed runtime around each worker (docs/security.md)."
        )
    return holds

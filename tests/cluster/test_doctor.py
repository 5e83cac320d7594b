"""`pie doctor` says which limits of programs hold, by trying them."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from pie.cluster.doctor import examine, show_examined
from pie.inferlet import probe
from pie.inferlet.confine import ProcessLimits
from pie.inferlet.probe import Probed
from pie.worker.settings import ProgramSettings


def told(found: Probed) -> tuple[bool, str]:
    out = io.StringIO()
    holds = show_examined(found, Console(file=out, width=200))
    return holds, out.getvalue()


def test_what_a_program_must_not_do_is_tried() -> None:
    found = examine(ProgramSettings())
    assert "rlimits" in found.parts
    for limit in ("memory beyond its limit", "more open files", "more CPU time"):
        assert found.kept[limit]
    if {"landlock", "seccomp"} <= set(found.parts):
        assert all(found.kept.values())


@pytest.mark.parametrize(
    "name",
    [
        "memory beyond its limit",
        "more open files",
        "reading files",
        "writing files",
        "network",
        "sockets of this host",
        "signals to others",
        "datagrams to sockets of this host",
        "signals by way of sockets",
        "how other processes are scheduled",
        "outliving its worker",
        "shared memory",
        "memory outside its address space",
        "message queues",
        "semaphores",
        "watching files",
    ],
)
def test_where_nothing_is_kept_from_it_an_attempt_goes_through(name: str) -> None:
    assert not probe._kept(probe._attempts(ProcessLimits(1 << 20, 10, 16))[name])


def test_what_does_not_hold_is_said() -> None:
    found = examine(ProgramSettings())
    open_host = msgspec.structs.replace(
        found, parts=("rlimits",), kept=found.kept | {"network": False}
    )
    holds, text = told(open_host)
    assert not holds
    assert "kept from: network                            NO" in text
    assert text.count("NOT HERE") == 2
    assert "docs/security.md" in text

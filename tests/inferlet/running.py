"""Runs programs on a local engine, for tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from textwrap import dedent

from pie.worker.programs.host import ProgramToRun, RunningProgram
from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import Ended, EndReason

ENDS_S = 240.0
"""Longest wait for anything here; only a failing test waits so long."""


@dataclass
class Ran:
    """How a program went."""

    ended: Ended
    said: list[str] = field(default_factory=list)

    @property
    def result(self) -> str:
        assert self.ended.reason is EndReason.FINISHED, f"{self.ended.reason}: {self.ended.error}"
        return self.ended.result


async def start(
    local: LocalEngine, source: str, said: list[str] | None = None, **arguments: object
) -> RunningProgram:
    program = ProgramToRun(
        "program.py", dedent(source), {name: str(value) for name, value in arguments.items()}
    )
    return await local.host.start(program, on_said=(said if said is not None else []).append)


async def run(local: LocalEngine, source: str, **arguments: object) -> Ran:
    """Run a program to its end; all its pages must be free then."""
    said: list[str] = []
    running = await start(local, source, said, **arguments)
    async with asyncio.timeout(ENDS_S):
        ended = await running.ended
    return Ran(ended, said)


async def until_idle(local: LocalEngine) -> None:
    """Wait until no program holds a page."""
    async with asyncio.timeout(ENDS_S):
        while local.engine.status.pages_writable or local.engine.status.pages_in_use:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

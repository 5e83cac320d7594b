"""A worker with one program that never ends, for tests to kill: `python -m … MODEL CACHE`."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from pydantic import ByteSize

from pie.worker.programs.host import ProgramToRun
from pie.worker.programs.local import LocalEngine
from pie.worker.settings import ModelSettings, ProgramSettings

PROGRAM = """
async def main(ctx):
    await ctx.say("running")
    while True:
        pass
"""


async def main() -> None:
    settings = ModelSettings(
        source=sys.argv[1],
        dtype="float32",
        device_kv_budget=ByteSize(4 << 20),
        attention="torch",
        cache_folder=Path(sys.argv[2]),
        threads=1,
    )
    local = LocalEngine(settings, ProgramSettings())
    await local.start()
    said = asyncio.Event()
    running = await local.host.start(
        ProgramToRun("endless.py", PROGRAM, {}), on_said=lambda _: said.set()
    )
    await said.wait()
    sys.stdout.write("running\n")
    sys.stdout.flush()
    await running.ended


if __name__ == "__main__":
    asyncio.run(main())

"""A program's process: `python -m pie.inferlet.process FD LIMITS`.

Covers confining itself, taking the program from its host, running it and telling how it ended. Does not
cover who starts it (`pie.worker.programs.process`).
"""

from __future__ import annotations

import asyncio
import linecache
import os
import socket
import sys
import traceback
import types

import msgspec

from pie.inferlet.confine import ProcessLimits, confine
from pie.inferlet.connection import Connection
from pie.inferlet.context import Context
from pie.inferlet.parameters import ProgramTextError, read_program
from pie.inferlet.tools import tool_of
from pie.wire.pipe import Pipe
from pie.wire.programs import Begin, Finished

_MOST_ERROR_CHARS = 20_000


def main() -> None:
    """Run one program."""
    end = socket.socket(fileno=int(sys.argv[1]))
    limits = msgspec.json.decode(sys.argv[2], type=ProcessLimits)
    confine(limits)
    asyncio.run(_run(end))
    sys.stdout.flush()
    # Threads that a program left behind are no reason to stay.
    os._exit(0)


async def _run(end: socket.socket) -> None:
    connection = Connection(await Pipe.open(end))
    begin = await connection.begin()
    try:
        result = await _call(connection, begin)
        told = Finished("" if result is None else str(result))
    except ProgramTextError as error:
        told = Finished(error=str(error))
    except BaseException as error:  # noqa: BLE001 - whatever a program raises is told
        told = Finished(error=_told(error, begin.name))
    connection.tell(told)
    await connection.close()


async def _call(connection: Connection, begin: Begin) -> object:
    values = read_program(begin.source, begin.name, begin.entry).convert(begin.arguments)
    module = types.ModuleType("__inferlet__")
    module.__file__ = begin.name
    sys.modules[module.__name__] = module
    # So that a traceback shows the program's lines.
    lines = begin.source.splitlines(keepends=True)
    linecache.cache[begin.name] = (len(begin.source), None, lines, begin.name)
    exec(compile(begin.source, begin.name, "exec"), module.__dict__)  # noqa: S102 - what it is for
    context = Context(connection, begin.model, [tool_of(one) for one in begin.tools])
    result: object = await module.__dict__[begin.entry](context, **values)
    return result


def _told(error: BaseException, name: str) -> str:
    """Return a traceback that begins in the program."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if frame.filename == name), 0)
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames[first:])]
    lines += traceback.format_exception_only(error)
    return "".join(lines)[-_MOST_ERROR_CHARS:]


if __name__ == "__main__":
    main()

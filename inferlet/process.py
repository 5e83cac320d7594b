"""A program's process: `python -m pie.inferlet.process FD LIMITS`.

Covers confining itself, taking the program from its host, running it and telling how it ended. Does not
cover who starts it (`pie.worker.programs.process`).
"""

from __future__ import annotations

import asyncio
import inspect
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
from pie.wire.pipe import MAX_FROM_PROGRAM_BYTES, Pipe
from pie.wire.programs import Begin, Finished

_MOST_ERROR_CHARS = 20_000
_MOST_RESULT_CHARS = 8 << 20


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
    connection = Connection(await Pipe.open(end, max_sent=MAX_FROM_PROGRAM_BYTES))
    begin = await connection.begin()
    try:
        result = await _call(connection, begin)
        unheard, warning = await connection.settle(), ""
        if unheard is not None:
            text = f"{type(unheard).__name__}: {unheard}"
            warning = _text(f"warning: a call that nobody awaited failed: {text}")
        # Longer ones are too long for any host, which says so where it sees one.
        told = Finished(
            "" if result is None else _text(str(result)[:_MOST_RESULT_CHARS]), warning=warning
        )
    except ProgramTextError as error:
        told = Finished(error=_text(str(error)))
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
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ProgramTextError(
            f"{begin.entry} returned something that was not awaited, of type {type(result).__name__}"
        )
    return result


def _told(error: BaseException, name: str) -> str:
    """Return a traceback that begins in the program; without lines where the program has no part in it."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((at for at, frame in enumerate(frames) if frame.filename == name), len(frames))
    lines = traceback.format_list(frames[first:])
    if lines:
        lines.insert(0, "Traceback (most recent call last):\n")
    lines += traceback.format_exception_only(error)
    return _text("".join(lines)[-_MOST_ERROR_CHARS:])


def _text(text: str) -> str:
    """Return text that can be written in UTF-8."""
    return text.encode(errors="backslashreplace").decode()


if __name__ == "__main__":
    main()

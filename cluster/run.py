"""`pie run`: one program, against a model of its own or on a cluster.

Covers the program's command line, made from its text, running it in this process's engine or by a router,
and printing what it says. Does not cover the `pie` command itself (`pie.cluster.cli`) or what a program may do (`pie.worker.programs`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

from pie.cluster.asking import check_key
from pie.cluster.config import PieConfig
from pie.cluster.errors import ClusterError
from pie.inferlet.client import RunEvent, Where, no_messages, run_upload
from pie.inferlet.errors import NotRunError
from pie.inferlet.parameters import ProgramText, ProgramTextError, read_program
from pie.inferlet.upload import Upload
from pie.worker.errors import ToolError, WorkerError
from pie.worker.programs.process import EndReason
from pie.worker.programs.tools import Tool, load_tools

_MOST_SOURCE_BYTES = 1 << 20
_BEFORE_PROGRAM = ("--at", "--tool", "--model", "--config")
_LONGEST_LINE = 4_096
"""Characters that a line may have before a part of it is printed."""


class ProgramError(ClusterError):
    """The program cannot be run as it is given."""


def run_program(
    config: PieConfig,
    path: Path,
    words: Sequence[str],
    report: Callable[[str, str], None],
    at: str | None = None,
    tools_by: str = "programs.tools",
) -> bool:
    """Run the program at `path` and print what it says, prints and returns.

    Args:
        config: The model's and the programs' sections are used; with `at` the router's token.
        path: A Python file.
        words: The rest of the command line.
        report: Told what is done while the model loads.
        at: A router's address; None runs it on a model of its own.
        tools_by: What says which tools there are, for errors.

    Returns:
        Whether it ended well.

    Raises:
        ProgramError: It cannot be run, or the words do not fit it.
        SystemExit: The words ask for help, which is printed.
    """
    source = _read(path)
    try:
        text = read_program(source, str(path))
        arguments = _arguments(text, path, words)
        text.convert(arguments)
    except ProgramTextError as error:
        raise ProgramError(str(error)) from error
    program = Upload(path.name, source, "main")
    try:
        if at is None:
            tools = _tools(config, tools_by)
            reason, result, wrong = asyncio.run(_run(config, program, arguments, tools, report))
        else:
            where = Where(at.rstrip("/"), config.router.api_token.get_secret_value())
            check_key(where.url, where.token)
            reason, result, wrong = asyncio.run(_run_at(where, program, arguments))
    except (WorkerError, NotRunError) as failed:
        raise ProgramError(str(failed)) from failed
    if result:
        _print(result + "\n")
    if wrong or reason != EndReason.FINISHED:
        sys.stderr.write(f"{wrong.rstrip()}\n")
        if reason not in (EndReason.FINISHED, EndReason.RAISED):
            sys.stderr.write(f"pie: {path.name} was ended: {reason}\n")
    return reason == EndReason.FINISHED


async def _run(
    config: PieConfig,
    program: Upload,
    arguments: Mapping[str, str],
    tools: Sequence[Tool],
    report: Callable[[str, str], None],
) -> tuple[str, str, str]:
    """Run a program here; return why it ended, its result and what went wrong."""
    # The engine's libraries take seconds to load, and a cluster has its own.
    from pie.worker.programs.host import ProgramToRun  # noqa: PLC0415
    from pie.worker.programs.local import LocalEngine  # noqa: PLC0415

    local = LocalEngine(config.model, config.programs, tools)
    output = _OutputLines()
    try:
        await local.start(lambda what: report("model", what))
        running = await local.host.start(
            ProgramToRun(program.name, program.source, arguments),
            on_said=lambda text: _print(text + "\n"),
            on_output=output.write,
        )
        running.tell(None)
        ended = await running.ended
        return ended.reason, ended.result, ended.error
    finally:
        output.end()
        await local.close()


async def _run_at(
    where: Where, program: Upload, arguments: Mapping[str, str]
) -> tuple[str, str, str]:
    """Run a program on a cluster; return the same."""
    output, event = _OutputLines(), RunEvent()
    stream = run_upload(program, where, {"arguments": dict(arguments)}, no_messages())
    try:
        async with aclosing(stream):
            async for event in stream:
                if event.type == "said":
                    _print(event.text + "\n")
                elif event.type == "printed":
                    output.write(event.text)
    finally:
        output.end()
    return event.reason, event.result, event.error


class _OutputLines:
    """What a program prints, line by line, so that what it says never stands inside a line."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> None:
        """Print the lines that are whole now, and the rest where it is long."""
        whole, end, self._begun = (self._begun + text).rpartition("\n")
        if len(self._begun) > _LONGEST_LINE:
            self._begun, end, whole = "", "", whole + end + self._begun
        if whole or end:
            _print(whole + end)

    def end(self) -> None:
        """Print what is left of a line."""
        if self._begun:
            _print(self._begun)
        self._begun = ""


def _arguments(text: ProgramText, path: Path, words: Sequence[str]) -> dict[str, str]:
    parser = argparse.ArgumentParser(
        prog=f"pie run {path}",
        description=text.doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for one in text.parameters:
        told = "required" if one.default is None else f"default: {one.default}"
        parser.add_argument(
            f"--{one.name.replace('_', '-')}",
            dest=one.name,
            metavar=one.kind.upper(),
            required=one.default is None,
            help=f"{one.kind}, {told}",
        )
    own = {f"--{one.name.replace('_', '-')}" for one in text.parameters}
    for word in words:
        option = word.partition("=")[0]
        if option in _BEFORE_PROGRAM and option not in own:
            raise ProgramError(f"{option} stands before the program: pie run {option} … {path}")
    found = parser.parse_args(words)
    return {name: value for name, value in vars(found).items() if value is not None}


def _tools(config: PieConfig, said_by: str) -> list[Tool]:
    """Return the tools, before the time is spent that a model takes to load."""
    try:
        return load_tools(config.programs.tools)
    except ToolError as error:
        raise ProgramError(str(error).replace("programs.tools", said_by, 1)) from error


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if len(data) > _MOST_SOURCE_BYTES:
            raise ProgramError(f"{path} is larger than {_MOST_SOURCE_BYTES} bytes")
        return data.decode()
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ProgramError(f"{path} is not text in UTF-8") from error


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()

"""`pie run`: one program against a model of its own.

Covers the program's command line, made from its text, and running it in this process's engine. Does not
cover the `pie` command itself (`pie.cluster.cli`) or what a program may do (`pie.worker.programs`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pie.cluster.config import PieConfig
from pie.cluster.errors import ClusterError
from pie.inferlet.parameters import ProgramText, ProgramTextError, read_program
from pie.worker.errors import WorkerError
from pie.worker.programs.host import ProgramToRun
from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import Ended, EndReason

_MOST_SOURCE_BYTES = 1 << 20
_LONGEST_LINE = 4_096
"""Characters that a line may have before a part of it is printed."""


class ProgramError(ClusterError):
    """The program cannot be run as it is given."""


def run_program(
    config: PieConfig, path: Path, words: Sequence[str], report: Callable[[str, str], None]
) -> bool:
    """Run the program at `path` and print what it says, prints and returns.

    Args:
        config: The model's and the programs' sections are used.
        path: A Python file.
        words: The rest of the command line.
        report: Told what is done while the model loads.

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
    program = ProgramToRun(path.name, source, arguments)
    try:
        ended = asyncio.run(_run(config, program, report))
    except WorkerError as error:
        raise ProgramError(str(error)) from error
    if ended.result:
        _print(ended.result + "\n")
    if ended.reason is not EndReason.FINISHED:
        sys.stderr.write(f"{ended.error.rstrip()}\n")
        if ended.reason is not EndReason.RAISED:
            sys.stderr.write(f"pie: {path.name} was ended: {ended.reason}\n")
    return ended.reason is EndReason.FINISHED


async def _run(
    config: PieConfig, program: ProgramToRun, report: Callable[[str, str], None]
) -> Ended:
    local = LocalEngine(config.model, config.programs)
    output = _OutputLines()
    try:
        await local.start(lambda what: report("model", what))
        running = await local.host.start(
            program, on_said=lambda text: _print(text + "\n"), on_output=output.write
        )
        return await running.ended
    finally:
        output.end()
        await local.close()


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
    found = parser.parse_args(words)
    return {name: value for name, value in vars(found).items() if value is not None}


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

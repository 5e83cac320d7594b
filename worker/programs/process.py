"""One program's process, as its host sees it.

Covers starting it, its end of the pipe, its output, time limits from outside, and why it ended. Does not
cover what its calls do (`pie.worker.programs.host`) or what the process may do (`pie.inferlet.confine`,
which it runs itself).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import enum
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pie.wire.errors import BadMessage, PeerGone
from pie.wire.frames import Buffer
from pie.wire.pipe import MAX_FROM_PROGRAM_BYTES, Pipe
from pie.wire.programs import Begin, Finished, FromProgram, decode_from_program
from pie.worker.settings import ProgramSettings

_MODULE = "pie.inferlet.process"
_LIBRARIES = ("pie.inferlet", "msgspec", "numpy")
_ENDS_S = 5.0
"""How long a program that has finished, or whose process was killed, may take to be gone."""
_READ_BYTES = 1 << 16
_LEAST_SAID_BYTES = 64
"""What a message to the client counts at least: an empty one takes memory on its way too."""
_MOST_ERROR_CHARS = 20_000
_LOOKS_S = 0.5
"""How often the CPU time of a process is looked at."""


class EndReason(enum.StrEnum):
    """Why a program ended."""

    FINISHED = "finished"
    RAISED = "raised"
    CANCELLED = "cancelled"
    TOO_LONG = "too_long"
    TOO_MUCH_CPU = "too_much_cpu"
    TOO_MUCH_OUTPUT = "too_much_output"
    DIED = "died"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    reason: EndReason
    result: str = ""
    """What `main` returned, as text."""
    error: str = ""
    """What went wrong: a traceback where it raised, else a sentence; where it finished, a warning or nothing."""
    output: str = ""
    """What it printed, up to the limit."""


class ProgramProcess:
    """A process that runs one program.

    Args:
        settings: Its limits.
        on_output: Called with what it prints, as it comes.
    """

    def __init__(self, settings: ProgramSettings, on_output: Callable[[str], None]) -> None:
        self._settings = settings
        self._on_output = on_output
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: Pipe | None = None
        self._reading: asyncio.Task[None] | None = None
        self._watching_cpu: asyncio.Task[None] | None = None
        self._output = bytearray()
        self._said_bytes = 0
        self._finished: Finished | None = None
        self._end: EndReason | None = None
        """Why it was ended from outside."""
        self._watching: asyncio.Task[None] | None = None
        self.on_gone: Callable[[], None] = lambda: None
        """Called once its process has ended, read to its end or not."""
        self._broken = ""
        """What was wrong with what it sent."""

    async def start(self, begin: Begin) -> None:
        """Start the process and send it its program.

        Raises:
            OSError: There is no process to be had.
        """
        settings = self._settings
        ours, theirs = socket.socketpair()
        limits = {
            "memory_bytes": int(settings.memory),
            "cpu_s": settings.cpu_s,
            "open_files": settings.open_files,
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                _MODULE,
                str(theirs.fileno()),
                msgspec.json.encode(limits).decode(),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=program_environment(),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._pipe = await Pipe.open(ours, max_bytes=MAX_FROM_PROGRAM_BYTES)
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read_output())
        self._watching = loop.create_task(self._watch())
        self._watching_cpu = loop.create_task(self._watch_cpu(self._process.pid))
        self._pipe.send(begin)

    async def read(self) -> tuple[FromProgram, Sequence[bytes]] | None:
        """Return its next message; None where no more come."""
        assert self._pipe is not None
        try:
            await self._pipe.drain()
            header, frames = await self._pipe.read()
            message = decode_from_program(header)
        except PeerGone:
            return None
        except (BadMessage, ValueError, RecursionError):
            # Its libraries send none such, but a program need not use them.
            self._broken = "its process sent what is no message, or too large a one"
            self.kill(EndReason.DIED)
            return None
        if isinstance(message, Finished):
            self._finished = message
            if len(message.result.encode()) > int(self._settings.output):
                self.kill(EndReason.TOO_MUCH_OUTPUT)
            return None
        return message, frames

    def send(self, message: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        """Say something to it."""
        assert self._pipe is not None
        self._pipe.send(message, frames)

    def may_say(self, size_bytes: int) -> bool:
        """Count a message to the client and say whether it may pass; one too many ends the program."""
        self._said_bytes += max(size_bytes, _LEAST_SAID_BYTES)
        if self._said_bytes > int(self._settings.output):
            self.kill(EndReason.TOO_MUCH_OUTPUT)
            return False
        return True

    def kill(self, reason: EndReason) -> None:
        """End it at once; the first reason counts."""
        self._end = self._end or reason
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                # It leads a session of its own, so whatever it started goes too.
                os.killpg(process.pid, signal.SIGKILL)

    async def ended(self) -> Ended:
        """Wait until it is gone, ending it where it does not go, and say how it ended."""
        process, pipe = self._process, self._pipe
        assert process is not None
        if self._finished is None and self._end is None:
            # It said nothing more: it is dead, or does something that it should not.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDS_S):
                    await process.wait()
        if pipe is not None:
            pipe.abort()
        own_end = process.returncode
        self.kill(EndReason.DIED)
        async with asyncio.timeout(_ENDS_S):
            await process.wait()
        if self._watching_cpu is not None:
            self._watching_cpu.cancel()
        if self._reading is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ENDS_S):
                    await self._reading
        return self._how(own_end)

    def _how(self, own_end: int | None) -> Ended:
        output = self._output.decode(errors="replace")
        outside = None if self._end is EndReason.DIED else self._end
        if outside is not None:
            return Ended(outside, error=_SENTENCES[outside].format(self._settings), output=output)
        if self._finished is not None:
            if self._finished.error:
                error = self._finished.error[-_MOST_ERROR_CHARS:]
                return Ended(EndReason.RAISED, error=error, output=output)
            warning = self._finished.warning[-_MOST_ERROR_CHARS:]
            return Ended(EndReason.FINISHED, self._finished.result, warning, output)
        if own_end == -signal.SIGXCPU:
            reason = EndReason.TOO_MUCH_CPU
            return Ended(reason, error=_SENTENCES[reason].format(self._settings), output=output)
        how = self._broken or "its process let go of its connection to the worker"
        if own_end is not None and not self._broken:
            how = "its process ended"
            how += f" by signal {-own_end}" if own_end < 0 else f" with exit code {own_end}"
        return Ended(EndReason.DIED, error=how, output=output)

    async def _watch(self) -> None:
        assert self._process is not None
        await self._process.wait()
        self.on_gone()

    async def _watch_cpu(self, pid: int) -> None:
        """End it where it has used its time: it may have turned off the signal that says so."""
        while self._process is not None and self._process.returncode is None:
            if _cpu_s(pid) >= self._settings.cpu_s:
                self.kill(EndReason.TOO_MUCH_CPU)
            await asyncio.sleep(_LOOKS_S)

    async def _read_output(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        limit = int(self._settings.output)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while piece := await self._process.stdout.read(_READ_BYTES):
            kept = piece[: max(0, limit - len(self._output))]
            self._output += kept
            self._on_output(decoder.decode(kept))
            if len(self._output) >= limit:
                self.kill(EndReason.TOO_MUCH_OUTPUT)


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used; 0 where it is gone."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    # What follows its name, which may hold anything: https://docs.kernel.org/filesystems/proc.html
    fields = told.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


_SENTENCES = {
    EndReason.CANCELLED: "it was cancelled",
    EndReason.TOO_LONG: "it ran longer than the {0.wall_s} s that a program may take",
    EndReason.TOO_MUCH_CPU: "it used the {0.cpu_s} s of CPU time that a program may use",
    EndReason.TOO_MUCH_OUTPUT: "it printed, said or returned more than the {0.output} bytes that a program may",
}


def program_environment() -> dict[str, str]:
    """Return what a program's process needs to find Python's libraries, and no more.

    All of `sys.path` would be too much: on it are the folder in which a cluster was started and that of its script,
    and a program may read what is on its path.
    """
    return {
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(_library_folders()),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        # A program's arithmetic stays off the model's cores.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        # Nor does Arrow's memory have a thread, which would not be confined (`pie.inferlet.confine`).
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }


def _library_folders() -> list[str]:
    """Return those entries of `sys.path` on which the libraries of a program's process were found."""
    specs = {name: importlib.util.find_spec(name) for name in _LIBRARIES}
    origins = {
        str(Path(*name.split("."), "__init__.py")): spec.origin
        for name, spec in specs.items()
        if spec is not None
    }
    return [
        entry
        for entry in dict.fromkeys(sys.path)
        if entry and any(origin == str(Path(entry, file)) for file, origin in origins.items())
    ]

"""Trying a grammar in another process before it is compiled here: a bad one may end the process that compiles it.

Covers starting that process, waiting for it, and ending it. Does not cover what it does
(`pie.worker.grammar_process`). Why: docs/design/0018-grammars.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
import sys
import threading

import msgspec

from pie.wire.messages import Grammar
from pie.worker.grammar_process import Setup, Verdict, read, write

_log = logging.getLogger(__name__)

_MODULE = "pie.worker.grammar_process"
_STARTS_S = 60.0
"""Longest wait for the process to know the model's tokens."""
_MORE_S = 5.0
"""That a verdict may take longer than one compilation may, on a busy host."""


class GrammarTrial:
    """Tries grammars for one model, each in a process that may die of it. For one thread at a time.

    The process that forks them is started with the first grammar, and ends with its parent.

    Args:
        setup: The model.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._is_new = True
        self._starting = threading.Lock()

    def start(self) -> None:
        """Start the process, without waiting for it.

        Raises:
            OSError: There is none to be had.
        """
        with self._starting:
            if self._process is not None:
                return
            if self._is_closed:
                raise OSError("grammars are tried no more")
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _MODULE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What Rust says there when a process dies is many lines, and the verdict says it in one.
                stderr=subprocess.DEVNULL,
                env=_environment(),
            )
            self._is_new = True

    def verdict(self, grammar: Grammar) -> Verdict:
        """Say what comes of compiling a grammar; may take seconds.

        Raises:
            OSError: It cannot be tried.
        """
        try:
            found = self._verdict(grammar)
        except OSError:
            # Something else may have ended the process meanwhile.
            found = self._verdict(grammar)
        if found.reason:
            _log.info("a grammar of %d characters is refused: %s", len(grammar.text), found.reason)
        return found

    def close(self) -> None:
        """End the process, whatever it does; from any thread."""
        with self._starting:
            self._is_closed = True
            self._end()

    def _verdict(self, grammar: Grammar) -> Verdict:
        self.start()
        process = self._process
        if process is None:
            raise OSError("grammars are tried no more")
        if self._is_new:
            self._is_new = False
            self._exchange(process, self._setup, _STARTS_S)
        return self._exchange(process, grammar, self._setup.limit_s + _MORE_S)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if stream is not None:
                        stream.close()

    def _exchange(
        self, process: subprocess.Popen[bytes], message: msgspec.Struct, limit_s: float
    ) -> Verdict:
        given, told = process.stdin, process.stdout
        assert given is not None
        assert told is not None
        with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
            write(given, message)
            poll = select.poll()
            poll.register(told, select.POLLIN)
            # Verdicts are small, so that one is there as a whole or not at all.
            if poll.poll(limit_s * 1000) and (found := read(told, Verdict)) is not None:
                return found
        with self._starting:
            self._end()
        raise OSError("the process that tries grammars is gone")


def _environment() -> dict[str, str]:
    return {
        "LANG": "C.UTF-8",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # It forks, so it must have one thread.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }

"""Grammars compiled beside an event loop and the step thread, one after another.

Covers waiting for them within a limit. Does not cover compiling (`pie.worker.grammar`).
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from pie.wire.errors import RefusedError
from pie.wire.messages import Grammar, RefusalCode
from pie.worker.grammar import Constraint, GrammarCompiler

_LIMIT_S = 10.0
"""Longest wait for a grammar, those before it included."""


class GrammarQueue:
    """Compiles grammars for one model.

    Args:
        compiler: Does the work.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pie-grammar")

    async def compiled(self, grammar: Grammar) -> Constraint:
        """Return the beginning of a grammar; a cancel ends the wait.

        Raises:
            RefusedError: It is wrong, or takes too long.
        """
        # What is known waits for nobody's compilation.
        if (found := self._compiler.ready(grammar)) is not None:
            return found
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, self._compiler.compile, grammar
        )
        try:
            async with asyncio.timeout(_LIMIT_S):
                return await work
        except TimeoutError:
            raise RefusedError(
                RefusalCode.BAD_GRAMMAR, f"it takes more than {_LIMIT_S:g} s to compile"
            ) from None

    def close(self) -> None:
        """Compile nothing more; what is being compiled now is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._compiler.close()

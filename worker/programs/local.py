"""A model with a host of programs and nothing else: no router, no index, no pool.

Covers starting and stopping it, for `pie run` and for measurements. Does not cover a worker of a cluster
(`pie.worker.service`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from pie.policies.lru import LruRetention
from pie.worker.assembly import assemble, make_engine, make_grammars, make_host
from pie.worker.commands import StepReport
from pie.worker.engine import Engine
from pie.worker.engine_thread import EngineThread
from pie.worker.grammar_queue import GrammarQueue
from pie.worker.programs.host import ProgramHost
from pie.worker.programs.tools import Tool
from pie.worker.settings import ModelSettings, ProgramSettings

log = logging.getLogger("pie.worker.programs.local")

_STEP_ENDS_S = 30.0


class LocalEngine:
    """A model in this process, and its host. Use `start` and `close`, on one event loop.

    Args:
        model: The `[model]` section.
        programs: The `[programs]` section.
        tools: What its programs may call, where that has been loaded; None loads what the section names.
    """

    def __init__(
        self,
        model: ModelSettings,
        programs: ProgramSettings,
        tools: Sequence[Tool] | None = None,
    ) -> None:
        self._model = model
        self._programs = programs
        self._tools = tools
        self._thread: EngineThread | None = None
        self._host: ProgramHost | None = None
        self._grammars: GrammarQueue | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def host(self) -> ProgramHost:
        """The host; valid after `start`."""
        assert self._host is not None
        return self._host

    @property
    def engine(self) -> Engine:
        """The engine; valid after `start`."""
        assert self._engine is not None
        return self._engine

    async def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load the model. Takes seconds to minutes.

        Raises:
            WorkerError: It cannot be had or served.
        """
        self._loop = asyncio.get_running_loop()
        assembly = await asyncio.to_thread(assemble, self._model, progress)
        self._engine = make_engine(assembly, self._model, LruRetention, lambda _: None, debug=False)
        self._thread = EngineThread(self._engine, self._reported, self._died)
        self._grammars = make_grammars(assembly)
        self._host = make_host(
            assembly, self._programs, self._thread.put, self._grammars, self._tools
        )
        self._thread.start()

    async def close(self) -> None:
        """End all programs and stop."""
        if self._host is not None:
            await self._host.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop, _STEP_ENDS_S)

    def _reported(self, report: StepReport) -> None:
        if report.programs and self._loop is not None:
            self._loop.call_soon_threadsafe(self.host.take, report.programs)

    def _died(self, error: BaseException) -> None:
        log.error("the engine ended: %s", error)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self.host.end_all)

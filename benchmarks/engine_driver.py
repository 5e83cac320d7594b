"""A worker's engine, driven by hand: no threads, no sockets, no router."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence

from pydantic import ByteSize

from pie.page.events import Epoch
from pie.policies.lru import LruRetention
from pie.wire.messages import Generate, Sampling
from pie.worker.assembly import assemble, make_engine
from pie.worker.commands import Submit
from pie.worker.runner import Runner
from pie.worker.settings import ModelSettings
from pie.worker.status import WorkerStatus

_OWNER = b"benchmark"


class EngineDriver:
    """SmolLM2 in bfloat16 in one engine, with the settings of a worker.

    Args:
        threads: Of torch, in this process.
        kv_bytes: Memory for pages.
    """

    def __init__(self, threads: int, kv_bytes: int = 1 << 30) -> None:
        settings = ModelSettings(
            dtype="bfloat16", threads=threads, device_kv_budget=ByteSize(kv_bytes)
        )
        assembly = assemble(settings, lambda _what: None)
        self.attention = [one.name for one in Runner(assembly.model, assembly.arena).backends]
        self.model = assembly.model.name
        self._engine = make_engine(
            assembly, settings, LruRetention, lambda _changes: None, debug=False
        )
        self._ids = itertools.count()

    @property
    def status(self) -> WorkerStatus:
        """What the engine has counted."""
        return self._engine.status

    def submit(self, prompt: Sequence[int], max_tokens: int) -> str:
        """Hand a greedy request over and return its id."""
        request = Generate(
            request_id=f"r{next(self._ids)}",
            epoch=Epoch(1),
            output_start=len(prompt),
            max_tokens=max_tokens,
            sampling=Sampling(temperature=0),
            ignore_eos=True,
        )
        self._engine.handle(Submit(_OWNER, request, array("I", prompt)))
        return request.request_id

    def step(self) -> Mapping[str, int]:
        """Run one step; return how many tokens it gave to which requests.

        Raises:
            RuntimeError: A request was refused or failed.
        """
        self._engine.step()
        report = self._engine.take_report()
        if report is None:
            return {}
        if report.refused:
            raise RuntimeError(f"refused: {report.refused[0][1]}")
        tokens: dict[str, int] = {}
        for delta in report.deltas.get(_OWNER, ()):
            if delta.error is not None:
                raise RuntimeError(f"failed: {delta.error}")
            tokens[delta.request_id] = tokens.get(delta.request_id, 0) + len(delta.token_ids)
        return tokens

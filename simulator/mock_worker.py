"""A mock engine as a worker of a live cluster: real wire, real index, made-up tokens and time.

Covers carrying messages between routers and a mock engine on a fast clock, and publishing its pages.
Does not cover the engine (`pie.simulator.engine`) or who starts routers and an index.

`python -m pie.simulator.mock_worker SPEC.json` runs one until it is terminated. It answers with one
token over and over, the one that the request's seed names, and with no text. Its pages are those of the
real page table, chosen to leave by the policies that its specification names.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from pie.index.contract import PlaceRecord
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PageEntry, PlaceId, PlaceKind
from pie.page.key import PageKey, model_root, tenant_root
from pie.policies.loader import load_policies
from pie.policies.manager import RetentionManager
from pie.simulator.cost_model import CostModel
from pie.simulator.engine import EngineSpec, Job, MockEngine
from pie.simulator.fast_clock import FastClock
from pie.simulator.worker import device_entry
from pie.tokens.tokenizer import Tokenizer
from pie.wire import Peer, PeerGone, RefusedError, WireServer, WireSettings
from pie.wire.messages import (
    AskStatus,
    Cancel,
    Generate,
    Load,
    Message,
    RefusalCode,
    StatusReport,
    TokenDelta,
)
from pie.worker.intake import Intake
from pie.worker.outbox import Outbox
from pie.worker.page_table import Change

_VOCAB_SIZE = 1 << 32
"""Tokens are made up: every id is one."""
_LOAD_EVERY_S = 0.5
"""As a live worker does, but on the engine's clock, it tells its load while nothing else does: here that
is as long as steps are alike."""
_LEAST_REAL_S = 0.01
_WIRE = WireSettings(max_frame_bytes=64 << 20, max_frames=1, max_handling_bytes=256 << 20)


class MockWorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a mock worker is."""

    place: str
    index: str
    """`IndexSettings` as JSON."""
    tokenizer: str
    """Folder that the worker's record names, for routers; requests bring token ids."""
    policies: str = ""
    """Text of a policy file, whose retention half chooses victims."""
    engine: EngineSpec = msgspec.field(default_factory=EngineSpec)
    cost: CostModel = msgspec.field(default_factory=CostModel)
    speed: float = 20.0
    """The engine's seconds in one real second."""
    epoch: int = 1
    model: str = "mock"


@dataclass(frozen=True, slots=True)
class _Asked:
    """Whose request a job is."""

    owner: bytes
    request_id: str


class MockWorkerService:
    """A worker whose model is made up. For the running event loop.

    Args:
        spec: What it is.

    Raises:
        SetupError: The specification makes no sense.
        PolicyFileError: Its policies are not acceptable.
    """

    def __init__(self, spec: MockWorkerSpec) -> None:
        spec.engine.check()
        spec.cost.check()
        self._spec = spec
        self._root = model_root(
            fingerprint=b"mock",
            dtype="none",
            page_tokens=spec.engine.page_tokens,
            layout_id="mock",
        )
        self._page_bytes = spec.cost.bytes_of(spec.engine.page_tokens)
        policies = load_policies(spec.policies, name="policies")
        self.engine = MockEngine(
            spec.engine,
            spec.cost,
            FastClock(spec.speed),
            retention=RetentionManager(policies.new_retention(), name="device"),
            on_report=self._reported,
            on_changes=self._changed,
        )
        self._intake = Intake(_VOCAB_SIZE, self.engine.context_tokens)
        self._held: dict[PageKey, PageEntry] = {}
        self._asked: dict[str, _Asked] = {}
        self._jobs: dict[_Asked, str] = {}
        self._submitted = 0
        self._outboxes: dict[bytes, Outbox] = {}
        self._server = WireServer(
            "tcp://127.0.0.1:0",
            self._handle,
            epoch=Epoch(spec.epoch),
            on_peer=self._open_outbox,
            settings=_WIRE,
        )
        self._publisher: Publisher | None = None
        self._loads: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve, and announce the worker."""
        spec, engine = self._spec, self._spec.engine
        address = await self._server.start()
        tokenizer = await asyncio.to_thread(Tokenizer.load, Path(spec.tokenizer))
        settings = IndexSettings.model_validate_json(spec.index)
        record = PlaceRecord(
            place=PlaceId(spec.place),
            epoch=Epoch(spec.epoch),
            kind=PlaceKind.WORKER,
            address=address,
            model_root=self._root,
            model_name=spec.model,
            dtype="none",
            layout_id="mock",
            page_tokens=engine.page_tokens,
            context_tokens=self.engine.context_tokens,
            vocab_size=_VOCAB_SIZE,
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer_path=spec.tokenizer,
            tokenizer_digest=tokenizer.digest,
            total_pages=engine.pages,
            ttl_s=settings.ttl_s,
        )
        self._publisher = Publisher(
            settings.url, record, lambda: list(self._held.values()), settings=settings
        )
        await self._publisher.start()
        self._loads = asyncio.get_running_loop().create_task(self._tell_loads())

    async def close(self) -> None:
        """Stop at once, and withdraw the worker."""
        if self._loads is not None:
            self._loads.cancel()
            await asyncio.gather(self._loads, return_exceptions=True)
        for outbox in list(self._outboxes.values()):
            await outbox.close()
        await self._server.close()
        if self._publisher is not None:
            await self._publisher.close()

    async def _handle(self, peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        match message:
            case Generate():
                self._generate(peer, message, self._intake.tokens(message, frames))
            case Cancel(request_id):
                job_id = self._jobs.get(_Asked(peer.id, request_id))
                if job_id is not None:
                    self._give_up(job_id)
            case AskStatus(request_id):
                counts, load = self.engine.counts, self.engine.load()
                counters: dict[str, int | float] = {
                    "prefill_tokens": counts.prefill_tokens,
                    "decode_tokens": counts.decode_tokens,
                    "evicted_pages": self.engine.table.evicted,
                }
                gauges: dict[str, int | float] = {"running": load.running, "waiting": load.waiting}
                told = (PlaceId(self._spec.place), Epoch(self._spec.epoch), "serving")
                await peer.send(StatusReport(request_id, *told, counters, gauges))
            case _:
                raise RefusedError(
                    RefusalCode.BAD_MESSAGE, f"a mock worker takes no {type(message).__name__}"
                )

    def _generate(self, peer: Peer, request: Generate, tokens: array[int]) -> None:
        if peer.id not in self._outboxes:
            raise PeerGone("the router went before its request was taken on")
        left = min(
            request.max_tokens - (len(tokens) - request.output_start),
            self.engine.context_tokens - len(tokens),
        )
        if left < 1:
            raise RefusedError(RefusalCode.CONTEXT_LENGTH, "there is no room for an answer")
        self._submitted += 1
        asked, job_id = _Asked(peer.id, request.request_id), str(self._submitted)
        self._asked[job_id], self._jobs[asked] = asked, job_id
        job = Job(
            job_id,
            tenant_root(self._root, salt=request.salt),
            tokens,
            left,
            (request.sampling.seed or 0) % _VOCAB_SIZE,
            tenant_tag=request.tenant_tag,
            session_tag=request.session_tag,
        )
        if not self.engine.submit(job):
            self._forget(job_id)
            raise RefusedError(RefusalCode.OVERLOADED, "the queue is full", 1.0)

    def _give_up(self, job_id: str) -> None:
        self._forget(job_id)
        self.engine.cancel(job_id)

    def _forget(self, job_id: str) -> None:
        asked = self._asked.pop(job_id, None)
        if asked is not None:
            self._jobs.pop(asked, None)

    def _open_outbox(self, peer: Peer) -> None:
        limit = 2 * (self._spec.engine.max_running + self._spec.engine.max_waiting)
        self._outboxes[peer.id] = Outbox(peer, epoch=Epoch(self._spec.epoch), limit=limit)
        peer.on_gone(lambda: self._router_gone(peer.id))

    def _router_gone(self, owner: bytes) -> None:
        outbox = self._outboxes.pop(owner, None)
        if outbox is not None:
            outbox.stop()
        for job_id in [job for asked, job in self._jobs.items() if asked.owner == owner]:
            self._give_up(job_id)

    def _reported(self, deltas: Sequence[TokenDelta], load: Load) -> None:
        """Send each router its tokens, under its own names."""
        told: dict[bytes, list[TokenDelta]] = {}
        for delta in deltas:
            asked = self._asked.get(delta.request_id)
            if asked is None:
                continue
            if delta.finish_reason is not None:
                self._forget(delta.request_id)
            named = msgspec.structs.replace(delta, request_id=asked.request_id)
            told.setdefault(asked.owner, []).append(named)
        for owner, some in told.items():
            if owner in self._outboxes:
                self._outboxes[owner].put(some, load)

    def _changed(self, changes: list[Change]) -> None:
        """Tell the index, in order."""
        assert self._publisher is not None
        at = 0
        while at < len(changes):
            stored, entries = changes[at].stored, list[PageEntry]()
            while at < len(changes) and changes[at].stored is stored:
                entries.append(device_entry(changes[at].page, self._page_bytes))
                at += 1
            if stored:
                self._held.update((entry.key, entry) for entry in entries)
                self._publisher.stored(entries)
            else:
                for entry in entries:
                    del self._held[entry.key]
                self._publisher.removed(entries)

    async def _tell_loads(self) -> None:
        every_s = max(_LOAD_EVERY_S / self._spec.speed, _LEAST_REAL_S)
        while True:
            await asyncio.sleep(every_s)
            if not self.engine.is_idle:
                for outbox in self._outboxes.values():
                    outbox.tell_load(self.engine.load())


async def _serve(spec: MockWorkerSpec) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    service = MockWorkerService(spec)
    await service.start()
    try:
        await stopped.wait()
    finally:
        await service.close()


def main() -> None:
    """Run the mock worker that a file describes."""
    uvloop.run(_serve(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MockWorkerSpec)))


if __name__ == "__main__":
    main()

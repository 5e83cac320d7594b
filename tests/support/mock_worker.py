"""A worker without a model, in a process of its own: real wire, real index, made-up tokens.

Its answer to any prompt is one fixed text, token by token, so that a stream that goes on at another
mock must read as if nothing had happened. It holds the pages of what it was asked and what it
answered, and says so in the index.

`python -m tests.support.mock_worker SPEC.json` runs one; `MockWorker` starts that from a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from pie.index.contract import PlaceRecord
from pie.index.publisher import Publisher
from pie.index.settings import IndexSettings
from pie.page.events import Epoch, PageEntry, Part, PlaceId, PlaceKind, Tier
from pie.page.key import PageKey, model_root, page_keys, tenant_root, unpack_tokens
from pie.tokens.detokenizer import Detokenizer
from pie.tokens.stops import StopMatcher
from pie.tokens.tokenizer import Tokenizer
from pie.wire import Peer, PeerGone, RefusedError, WireServer
from pie.wire.messages import (
    AskStatus,
    CachedTokens,
    Cancel,
    FinishReason,
    Generate,
    Load,
    Message,
    PositionLogprobs,
    RefusalCode,
    Started,
    StatusReport,
    StepTokens,
    TokenDelta,
    TokenLogprob,
)
from pie.wire.place_orders import Drained, DrainNode, TakeAgain, TakesAgain
from pie.wire.program_runs import (
    ProgramEnd,
    ProgramEvent,
    ProgramEventKind,
    ProgramEvents,
    ProgramTold,
    StartProgram,
    TellProgram,
)

ROOT = Path(__file__).parents[2]
REPLY = "The quick brown fox — naïve, “quoted” and 😀 — jumps over the lazy dog. "
_PROGRAM_S = 0.05
_DIES_S = 20.0
_ENDS_S = 60.0


class MockSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a mock is and how it behaves."""

    place: str
    index: str
    """`IndexSettings` as JSON."""
    tokenizer: str
    """Folder."""
    log: str
    """File for a JSON line about every request and cancel."""
    epoch: int = 1
    model: str = "mock"
    weights: str = "mock"
    """Mocks that differ in it do not share pages."""
    reply: str = REPLY
    page_tokens: int = 16
    context_tokens: int = 8192
    token_delay_s: float = 0.0
    """0 sends an answer whole."""
    answers_at_once: int = 0
    """Lets the others wait; 0 answers all at once."""
    die_after_tokens: int | None = None
    """Ends its own process, without a word, once it has sent so many tokens."""
    fail_after_tokens: int | None = None
    """Says that it failed after so many tokens of any request."""
    refuse: str | None = None
    """Refuses every request with this code."""
    silent: bool = False
    """Takes requests and never answers."""
    prefill_tokens_per_s: float = 1000.0
    spelled_by_bytes: bool = False
    """Answers in tokens of one byte, where the tokenizer would take longer ones."""
    takes_programs: bool = False
    """Runs any program: it says one thing, and then goes on until it is told or cancelled."""
    quiet: bool = False
    """Logs nothing and holds no pages, to cost a benchmark as little as can be."""


class MockWorker:
    """A mock in a process, for a test to talk to and to kill."""

    def __init__(self, spec: MockSpec, folder: Path) -> None:
        self.spec = spec
        self._log = Path(spec.log)
        file = folder / f"{spec.place}-{spec.epoch}.json"
        file.write_bytes(msgspec.json.encode(spec))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.mock_worker", str(file)], cwd=ROOT
        )

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait(_ENDS_S)

    def stop(self) -> None:
        """End it in order."""
        self.process.terminate()
        self.process.wait(_ENDS_S)

    def freeze(self) -> None:
        """Let it live but do nothing."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def events(self, kind: str) -> list[dict[str, object]]:
        """Return what it logged of one kind: `started`, `generate` or `cancel`."""
        if not self._log.exists():
            return []
        lines = self._log.read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["kind"] == kind]


class _Mock:
    """The worker itself."""

    def __init__(self, spec: MockSpec) -> None:
        self._spec = spec
        self._tokenizer = Tokenizer.load(Path(spec.tokenizer))
        self._reply = self._tokenizer.encode(spec.reply)
        if spec.spelled_by_bytes:
            ids = range(self._tokenizer.vocab_size)
            single = {self._tokenizer.token_bytes(id_): id_ for id_ in ids}
            self._reply = [single[bytes([byte])] for byte in spec.reply.encode()]
        self._root = model_root(
            fingerprint=spec.weights.encode(),
            dtype="float32",
            page_tokens=spec.page_tokens,
            layout_id="mock",
        )
        self._held: dict[PageKey, PageEntry] = {}
        self._running: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._sent = 0
        self._programs: dict[str, asyncio.Event] = {}
        self._room = asyncio.Semaphore(spec.answers_at_once or 1_000_000)
        self._publisher: Publisher

    async def run(self) -> None:
        """Serve until SIGTERM."""
        spec = self._spec
        server = WireServer("tcp://127.0.0.1:0", self._handle, epoch=Epoch(spec.epoch))
        address = await server.start()
        settings = IndexSettings.model_validate_json(spec.index)
        record = PlaceRecord(
            place=PlaceId(spec.place),
            epoch=Epoch(spec.epoch),
            kind=PlaceKind.WORKER,
            address=address,
            model_root=self._root,
            model_name=spec.model,
            dtype="float32",
            layout_id="mock",
            page_tokens=spec.page_tokens,
            context_tokens=spec.context_tokens,
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=self._tokenizer.eos_token_ids,
            tokenizer_path=spec.tokenizer,
            tokenizer_digest=self._tokenizer.digest,
            total_pages=10_000,
            takes_programs=spec.takes_programs,
            ttl_s=settings.ttl_s,
        )
        self._publisher = Publisher(
            settings.url, record, lambda: list(self._held.values()), settings=settings
        )
        await self._publisher.start()
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        self._write("started", address=address)
        await stopped.wait()
        await server.close()
        await self._publisher.close()

    async def _handle(self, peer: Peer, message: Message, frames: Sequence[memoryview]) -> None:
        spec = self._spec
        if isinstance(message, Cancel):
            self._write("cancel", request=message.request_id)
            task = self._running.pop((peer.id, message.request_id), None)
            if task is not None:
                task.cancel()
        elif isinstance(message, AskStatus):
            if not spec.silent:
                counters: dict[str, int | float] = {"decode_tokens": self._sent}
                gauges: dict[str, int | float] = {"running": len(self._running)}
                told = (PlaceId(spec.place), Epoch(spec.epoch), "serving", counters, gauges)
                await peer.send(StatusReport(message.request_id, *told))
        elif isinstance(message, DrainNode):
            await peer.send(Drained(message.request_id, 0, 0))
        elif isinstance(message, TakeAgain):
            await peer.send(TakesAgain(message.request_id))
        elif isinstance(message, StartProgram):
            wake = self._programs[message.request_id] = asyncio.Event()
            said = (ProgramEvent(ProgramEventKind.SAID, spec.reply),)
            await peer.send(ProgramEvents(message.request_id))
            await peer.send(ProgramEvents(message.request_id, said))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(wake.wait(), _PROGRAM_S)
            end = ProgramEnd("finished", message.entry)
            await peer.send(ProgramEvents(message.request_id, end=end))
        elif isinstance(message, TellProgram):
            self._programs[message.program].set()
            await peer.send(ProgramTold(message.request_id))
        elif isinstance(message, Generate):
            tokens = unpack_tokens(bytes(frames[0]))
            self._write(
                "generate",
                request=message.request_id,
                tokens=tokens,
                output_start=message.output_start,
                seed=message.sampling.seed,
                max_tokens=message.max_tokens,
                salt=message.salt,
                tenant_tag=message.tenant_tag,
                fork_of=message.fork_of,
                priority=message.priority,
                bad_words=message.sampling.bad_words,
                prompt_logprobs=message.prompt_logprobs,
            )
            if spec.refuse is not None:
                raise RefusedError(RefusalCode(spec.refuse), "as the test wants", 7.0)
            if spec.silent:
                return
            task = asyncio.ensure_future(self._answer_in_turn(peer, message, tokens))
            self._running[peer.id, message.request_id] = task
            task.add_done_callback(lambda _: self._running.pop((peer.id, message.request_id), None))

    async def _answer_in_turn(self, peer: Peer, message: Generate, tokens: array[int]) -> None:
        async with self._room:
            await self._answer(peer, message, tokens)

    async def _answer(self, peer: Peer, message: Generate, tokens: array[int]) -> None:
        """Send the fixed text from where the request's output is."""
        spec = self._spec
        prompt = tokens[: message.output_start].tolist()
        output = tokens[message.output_start :].tolist()
        root = tenant_root(self._root, salt=message.salt)
        keys = page_keys(root, tokens, spec.page_tokens)
        held = 0
        while held < len(keys) and keys[held] in self._held:
            held += 1
        cached = min(held * spec.page_tokens, len(tokens) - 1)
        started: Started | None = Started(CachedTokens(device=cached), 0.0, 0.0, 0.5)
        # As a worker does: what was sent before is known and not sent again.
        detokenizer = Detokenizer(self._tokenizer, prompt)
        stops = StopMatcher(message.stop)
        stops.push(detokenizer.push(output))
        deltas: list[TokenDelta] = []
        try:
            while True:
                token, finish = self._next(message, len(output))
                output.append(token)
                shown = stops.push("" if finish is FinishReason.STOP else detokenizer.push([token]))
                text = shown.text
                if shown.matched is not None:
                    finish = FinishReason.STOP
                elif finish is not None:
                    text += stops.push(detokenizer.flush()).text + stops.flush()
                failed = len(output) == spec.fail_after_tokens
                deltas.append(
                    TokenDelta(
                        request_id=message.request_id,
                        token_ids=() if failed else (token,),
                        text="" if failed else text,
                        finish_reason=FinishReason.FAILED if failed else finish,
                        started=started,
                        logprobs=self._logprobs(message, token),
                        prompt_logprobs=self._prompt_logprobs(message, prompt, started),
                        stop_string=shown.matched,
                        error="as the test wants" if failed else None,
                    )
                )
                started = None
                ended = failed or finish is not None
                if ended:
                    self._hold(root, [*prompt, *output[:-1]])
                if ended or spec.token_delay_s > 0:
                    await self._send(peer, deltas)
                    deltas = []
                if ended:
                    return
                await asyncio.sleep(spec.token_delay_s)
        except PeerGone:
            return

    def _next(self, message: Generate, position: int) -> tuple[int, FinishReason | None]:
        """Return the token at an output position, and whether it is the last."""
        reply = self._reply
        eos = self._tokenizer.eos_token_ids
        if position >= len(reply) and not message.ignore_eos and eos:
            return eos[0], FinishReason.STOP
        last = position + 1 >= message.max_tokens
        return reply[position % len(reply)], FinishReason.LENGTH if last else None

    def _prompt_logprobs(
        self, message: Generate, prompt: Sequence[int], started: Started | None
    ) -> tuple[PositionLogprobs, ...] | None:
        if message.prompt_logprobs is None or started is None:
            return None
        spelled = self._tokenizer.token_bytes
        return tuple(
            PositionLogprobs(TokenLogprob(token, spelled(token), -float(at)), ())
            for at, token in enumerate(prompt[1:], start=1)
        )

    def _logprobs(self, message: Generate, token: int) -> tuple[PositionLogprobs, ...] | None:
        wanted = message.sampling.logprobs
        if wanted is None:
            return None
        spelled = self._tokenizer.token_bytes(token)
        chosen = TokenLogprob(token, spelled, -0.25)
        others = tuple(
            TokenLogprob(i, self._tokenizer.token_bytes(i), -1.0 - i) for i in range(wanted - 1)
        )
        return (PositionLogprobs(chosen, (chosen, *others)[:wanted]),)

    def _hold(self, root: bytes, tokens: Sequence[int]) -> None:
        """Hold the pages of a sequence and say so."""
        if self._spec.quiet:
            return
        keys = page_keys(PageKey(root), tokens, self._spec.page_tokens)
        new = [
            PageEntry(key, keys[i - 1] if i else root, i, Part.FULL, Tier.DEVICE, 64)
            for i, key in enumerate(keys)
            if key not in self._held
        ]
        if new:
            self._held.update((entry.key, entry) for entry in new)
            self._publisher.stored(new)

    async def _send(self, peer: Peer, deltas: Sequence[TokenDelta]) -> None:
        running = len(self._running)
        load = Load(running, 0, 0, 9_000, 10_000, self._spec.prefill_tokens_per_s, 1.0)
        await peer.send(StepTokens(Epoch(self._spec.epoch), tuple(deltas), load))
        self._sent += sum(len(delta.token_ids) for delta in deltas)
        last = self._spec.die_after_tokens
        if last is not None and self._sent >= last:
            # What a client is to have seen it has once it gives credit for it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DIES_S):
                    while peer._credits.used != (0, 0) and not peer.is_gone:  # noqa: ASYNC110 - the other end makes it so
                        await asyncio.sleep(0.01)
            os._exit(9)

    def _write(self, kind: str, **more: object) -> None:
        if self._spec.quiet:
            return
        with Path(self._spec.log).open("a") as file:
            file.write(json.dumps({"kind": kind, "at": time.time(), **more}, default=list) + "\n")


def main() -> None:
    """Run the mock that a file describes."""
    spec = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=MockSpec)
    uvloop.run(_Mock(spec).run())


if __name__ == "__main__":
    main()

"""Inferlets: what they cost over the plain API, forks, and what eviction gives, for SmolLM2 in bfloat16.

Programs run in processes of their own, as users' do, and time themselves; requests go to the same engine's
step thread.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from array import array

from pydantic import ByteSize

from pie.page.events import Epoch
from pie.policies.lru import LruRetention
from pie.wire.messages import Generate, Sampling
from pie.worker.assembly import assemble, make_engine, make_grammars, make_host
from pie.worker.commands import StepReport, Submit
from pie.worker.engine_thread import EngineThread
from pie.worker.programs.host import ProgramToRun
from pie.worker.programs.process import EndReason
from pie.worker.settings import ModelSettings, ProgramSettings

THREADS = 2
_OWNER = b"benchmark"
_GREEDY = Sampling(temperature=0)

_GENERATE = """
import asyncio, json, time
from pie.inferlet import Context, greedy

async def main(ctx: Context, prompts: str, count: int):
    forks = [Context(ctx.connection(), ctx.model) for _ in json.loads(prompts)]
    for fork, tokens in zip(forks, json.loads(prompts)):
        fork.fill(tokens)
    began = time.perf_counter()
    await asyncio.gather(*(f.generate(greedy(), count, ignore_eos=True) for f in forks))
    return time.perf_counter() - began
"""
_ROUND_TRIPS = """
import json, time
from pie.inferlet import Context, ForwardPass, greedy

async def main(ctx: Context, prompt: str, count: int):
    pipe, ws = ctx.pipeline(), ctx.working_set
    token = (await pipe.run(ForwardPass(ws).input(json.loads(prompt)).sample(greedy()))).token
    apart, alone = [], []
    for _ in range(count // 10):  # in turns, so that both see the same machine
        for _ in range(10):
            began = time.perf_counter()
            token = (await pipe.run(ForwardPass(ws).input([token]).sample(greedy()))).token
            apart.append(time.perf_counter() - began)
        began = time.perf_counter()
        await ctx.fill([token]).generate(greedy(), 10, ignore_eos=True)
        alone.append((time.perf_counter() - began) / 10)
        (token,) = await ctx.take_tokens()
    apart.sort(), alone.sort()
    return json.dumps([apart[len(apart) // 2] * 1e3, alone[len(alone) // 2] * 1e3])
"""
_FORKS = """
import json, time
from pie.inferlet import Context, ForwardPass

async def main(ctx: Context, prompt: str):
    ws = ctx.working_set
    await ctx.pipeline().run(ForwardPass(ws).input(json.loads(prompt)))
    took = []
    for _ in range(20):
        began = time.perf_counter()
        forks = ws.forks(16)
        await ws.drop([])  # answered when the forks are there
        took.append((time.perf_counter() - began) * 1e3)
        for fork in forks:
            fork.close()
        await ws.drop([])  # what closing costs is no part of the next forks
    return sorted(took)[len(took) // 2]
"""
_CONSENSUS = """
import asyncio, json, time
from pie.inferlet import Context, Sampler

async def main(ctx: Context, prompt: str, count: int):
    ctx.fill(json.loads(prompt))
    began = time.perf_counter()
    forks = await ctx.fork(16)
    await asyncio.gather(*(
        fork.generate(Sampler(0.7, seed=at), count, ignore_eos=True) for at, fork in enumerate(forks)
    ))
    return time.perf_counter() - began
"""
_SINK = """
import json, time
from pie.inferlet import Context, ForwardPass, greedy

async def main(ctx: Context, prompt: str, timed: int):
    ws, pipe, tokens = ctx.working_set, ctx.pipeline(), json.loads(prompt)
    most = 0
    async def run(feed):
        nonlocal most
        result = await pipe.run(ForwardPass(ws).input(feed).sample(greedy()))
        middle = ws.slots[4:-252]
        if len(middle):
            ws.drop(middle)
        most = max(most, ws.pages)
        return result.token
    async def time_decode(token):
        took = []
        for _ in range(timed):
            began = time.perf_counter()
            token = await run([token])
            took.append((time.perf_counter() - began) * 1e3)
        return sorted(took)[timed // 2], ws.pages
    at, ends = 0, []
    token = None
    for stop in (320, 4096 - timed):
        while ws.length < stop:
            feed = tokens[ws.length : min(ws.length + 64, stop)]
            token = await run(feed)
        ends.append(await time_decode(token))
    return json.dumps([ends[0][0], ends[1][0], ends[1][1], ws.length])
"""
_SNAPKV = """
import asyncio, json, time
import numpy as np
from pie.inferlet import Context, ForwardPass, greedy

async def main(ctx: Context, prompts: str, count: int):
    pipe, contexts = ctx.pipeline(), []
    for tokens in json.loads(prompts):
        one = Context(ctx.connection(), ctx.model)
        contexts.append((one, tokens, await pipe.run(
            ForwardPass(one.working_set).input(tokens[:-1]).scores(16))))
    async def decode():
        twins = [one.working_set.fork(pipe) for one, _, _ in contexts]
        feeds = [tokens[-1] for _, tokens, _ in contexts]
        await pipe.submit(*(ForwardPass(ws).input([5]) for ws in twins))
        began = time.perf_counter()
        for _ in range(count):
            results = await pipe.submit(*(
                ForwardPass(ws).input([t]).sample(greedy()) for ws, t in zip(twins, feeds)))
            feeds = [result.token for result in results]
        took = time.perf_counter() - began
        for ws in twins:
            ws.close()
        return took / count * 1e3
    await contexts[0][0].working_set.drop([])
    full_ms, full_pages = await decode(), contexts[0][0].working_set.pages
    for one, tokens, result in contexts:
        mass = result.scores.sum((0, 1))[:-16]
        one.working_set.drop(np.argsort(-mass)[len(tokens) // 4 - 16:])
        await one.working_set.compact()
    kept_ms, kept_pages = await decode(), contexts[0][0].working_set.pages
    return json.dumps([full_ms, kept_ms, full_pages, kept_pages])
"""


class _Bench:
    """One engine on its thread, with a host of programs."""

    def __init__(self) -> None:
        settings = ModelSettings(
            dtype="bfloat16",
            threads=THREADS,
            device_kv_budget=ByteSize(1 << 30),
            program_share=0.95,
        )
        self._loop = asyncio.get_running_loop()
        assembly = assemble(settings, lambda _what: None)
        self.vocab_size = assembly.model.vocab_size
        self._engine = make_engine(assembly, settings, LruRetention, lambda _: None, debug=False)
        self._thread = EngineThread(self._engine, self._reported, lambda _error: None)
        self.host = make_host(
            assembly, ProgramSettings(), self._thread.put, make_grammars(assembly)
        )
        self._left = 0
        self._done = asyncio.Event()
        self._requests = 0
        self._thread.start()

    async def close(self) -> None:
        await self.host.close()
        await asyncio.to_thread(self._thread.stop, 30.0)

    def text(self, tokens: int, seed: int) -> list[int]:
        draw = random.Random(seed)
        return [draw.randrange(100, 40_000) for _ in range(tokens)]

    async def requests(self, prompts: list[list[int]], count: int) -> float:
        """Return the seconds that plain requests take, all together."""
        self._left, self._done = len(prompts), asyncio.Event()
        began_s = time.perf_counter()
        for prompt in prompts:
            self._requests += 1
            request = Generate(
                request_id=f"r{self._requests}",
                epoch=Epoch(1),
                output_start=len(prompt),
                max_tokens=count,
                sampling=_GREEDY,
                ignore_eos=True,
            )
            self._thread.put(Submit(_OWNER, request, array("I", prompt)))
        await self._done.wait()
        return time.perf_counter() - began_s

    async def program(self, source: str, **arguments: object) -> list[float]:
        """Return the number or numbers that a program returns."""
        given = {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in arguments.items()
        }
        running = await self.host.start(ProgramToRun("bench.py", source, given))
        ended = await running.ended
        if ended.reason is not EndReason.FINISHED:
            raise RuntimeError(ended.error)
        found = json.loads(ended.result)
        return [float(one) for one in (found if isinstance(found, list) else [found])]

    def _reported(self, report: StepReport) -> None:
        self._loop.call_soon_threadsafe(self._take, report)

    def _take(self, report: StepReport) -> None:
        self.host.take(report.programs)
        for delta in report.deltas.get(_OWNER, ()):
            if delta.finish_reason is not None:
                self._left -= 1
                if not self._left:
                    self._done.set()


def run() -> dict[str, object]:
    """Return each figure beside what it must be."""
    return asyncio.run(_run())


async def _run() -> dict[str, object]:
    bench = _Bench()
    found: dict[str, object] = {}
    try:
        for name, measure in (
            ("generate_over_api", _generate),
            ("round_trip", _round_trip),
            ("fork", _fork),
            ("consensus", _consensus),
            ("attention_sink", _sink),
            ("snapkv", _snapkv),
        ):
            found[name] = await measure(bench)
            print(name, found[name], flush=True)
        return found
    finally:
        await bench.close()


async def _generate(bench: _Bench) -> dict[str, object]:
    plain_s, program_s = [], []
    for at in range(3):
        prompts = [bench.text(16, 100 * at + one) for one in range(8)]
        plain_s.append(await bench.requests(prompts, 64))
        prompts = [bench.text(16, 9000 + 100 * at + one) for one in range(8)]
        program_s += await bench.program(_GENERATE, prompts=prompts, count=64)
    return {
        "api_tokens_per_s": round(8 * 64 / min(plain_s), 1),
        "program_tokens_per_s": round(8 * 64 / min(program_s), 1),
        "overhead": round(min(program_s) / min(plain_s) - 1, 4),
        "must_be_at_most": 0.05,
    }


async def _round_trip(bench: _Bench) -> dict[str, object]:
    apart, alone = await bench.program(_ROUND_TRIPS, prompt=bench.text(64, 1), count=100)
    return {
        "pass_ms": round(apart, 3),
        "engine_alone_ms": round(alone, 3),
        "beyond_the_model_ms": round(apart - alone, 3),
        "must_be_at_most": 1.0,
    }


async def _fork(bench: _Bench) -> dict[str, object]:
    (took,) = await bench.program(_FORKS, prompt=bench.text(2048, 2))
    return {"sixteen_forks_ms": round(took, 3), "must_be_at_most": 5.0}


async def _consensus(bench: _Bench) -> dict[str, object]:
    prompt = bench.text(2048, 3)
    prefill_s = await bench.requests([prompt], 1)
    decode_s = await bench.requests([prompt] * 16, 32)
    (took_s,) = await bench.program(_CONSENSUS, prompt=bench.text(2048, 4), count=32)
    return {
        "one_prefill_s": round(prefill_s, 3),
        "sixteen_decodes_s": round(decode_s, 3),
        "consensus_s": round(took_s, 3),
        "factor": round(took_s / (prefill_s + decode_s), 3),
        "must_be_at_most": 1.25,
    }


async def _sink(bench: _Bench) -> dict[str, object]:
    first, last, pages, length = await bench.program(_SINK, prompt=bench.text(4096, 5), timed=64)
    return {
        "first_ms": round(first, 2),
        "last_ms": round(last, 2),
        "factor": round(last / first, 3),
        "must_be_at_most": 1.1,
        "slots_written": int(length),
        "pages": int(pages),
        "pages_at_most": 20,
    }


async def _snapkv(bench: _Bench) -> dict[str, object]:
    prompts = [bench.text(2048, 10 + at) for at in range(8)]
    full, kept, full_pages, kept_pages = await bench.program(_SNAPKV, prompts=prompts, count=24)
    return {
        "full_step_ms": round(full, 2),
        "kept_step_ms": round(kept, 2),
        "faster": round(full / kept, 3),
        "must_be_at_least": 1.3,
        "pages": round(kept_pages / full_pages, 3),
        "pages_at_most": 0.3,
    }

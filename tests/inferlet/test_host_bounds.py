"""What a program makes its host hold, and how much of its time it takes, is bounded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from textwrap import dedent

import pytest
import pytest_asyncio
from pydantic import ByteSize

from pie.wire.programs import (
    CancelCall,
    DropSlots,
    GenerateTokens,
    OpenSet,
    PassInput,
    Rows,
    RunPass,
)
from pie.worker.programs import under_way
from pie.worker.programs.commands import ProgramCall, ProgramCommand
from pie.worker.programs.host import ProgramHost, ProgramToRun, RunningProgram
from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import EndReason
from pie.worker.programs.under_way import CallsUnderWay, size_of
from pie.worker.settings import ProgramSettings
from tests.inferlet.running import run

pytestmark = pytest.mark.asyncio(loop_scope="session")

_ENDS_S = 60.0


class SilentEngine:
    """A host whose engine takes calls and answers none."""

    def __init__(self, local: LocalEngine) -> None:
        self.commands: list[ProgramCommand] = []
        self.said: list[str] = []
        inner = local.host
        settings = ProgramSettings(memory=ByteSize(1 << 30), wall_s=240, output=ByteSize(64_000))
        self.host = ProgramHost(
            self.commands.append, inner._tokenizer, None, inner._facts, settings, inner._grammars
        )

    @property
    def calls(self) -> list[ProgramCall]:
        return [one for one in self.commands if isinstance(one, ProgramCall)]

    async def start(self, source: str) -> RunningProgram:
        return await self.host.start(
            ProgramToRun("program.py", dedent(source), {}), on_said=self.said.append
        )

    async def until(self, count: int) -> None:
        async with asyncio.timeout(_ENDS_S):
            while len(self.calls) < count:  # noqa: ASYNC110 - the host makes it so
                await asyncio.sleep(0.02)


@pytest_asyncio.fixture(loop_scope="session")
async def silent(local: LocalEngine) -> AsyncIterator[SilentEngine]:
    engine = SilentEngine(local)
    yield engine
    async with asyncio.timeout(_ENDS_S):
        await engine.host.close()


MANY_CALLS = """
    from pie.wire.programs import DropSlots, RunPass, PassInput
    import asyncio

    async def main(ctx):
        connection = ctx.connection()
        for call in range(1_000, 1_040):
            connection.tell(RunPass(call, (PassInput(1),)), [bytes(300_000)])
        await ctx.say("told")
        await ctx.listen()
    """


async def test_calls_beyond_the_bytes_that_may_wait_are_not_read(
    silent: SilentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "MOST_BYTES", 1 << 20)
    running = await silent.start(MANY_CALLS)
    await silent.until(4)
    # `told` is behind a call for which there is no room.
    assert running.calls.bytes <= 1 << 20
    for one in range(40):
        await silent.until(one + 1)
        assert running.calls.bytes <= 1 << 20
        running.calls.end(silent.calls[-1].call.call)
    async with asyncio.timeout(_ENDS_S):
        while silent.said != ["told"]:  # noqa: ASYNC110 - the program says it
            await asyncio.sleep(0.02)


async def test_a_program_that_dies_while_it_waits_for_room_is_gone(
    silent: SilentEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_way, "MOST_CALLS", 4)
    running = await silent.start(MANY_CALLS)
    await silent.until(4)
    assert running.process._process is not None
    os.kill(running.process._process.pid, signal.SIGKILL)
    async with asyncio.timeout(_ENDS_S):
        assert (await running.ended).reason is EndReason.DIED
    assert len(silent.calls) == 4
    assert len(running.calls) == 4, "the engine has answered none"


async def test_messages_that_say_nothing_count_too(silent: SilentEngine) -> None:
    running = await silent.start(
        "async def main(ctx):\n    for _ in range(10_000):\n        await ctx.say('')\n"
    )
    async with asyncio.timeout(_ENDS_S):
        assert (await running.ended).reason is EndReason.TOO_MUCH_OUTPUT
    assert len(silent.said) == 1_000


async def test_a_call_is_cancelled_once_and_only_while_it_is_under_way(
    silent: SilentEngine,
) -> None:
    running = await silent.start(
        """
        from pie.wire.programs import CancelCall, GenerateTokens

        async def main(ctx):
            connection = ctx.connection()
            connection.tell(GenerateTokens(999, 1, 8), [bytes(4)])
            for call in range(1_000, 11_000):
                connection.tell(CancelCall(call, call - 1_000))
                connection.tell(CancelCall(call, 999))
            await ctx.say("told")
            await ctx.listen()
        """
    )
    async with asyncio.timeout(_ENDS_S):
        while silent.said != ["told"]:  # noqa: ASYNC110 - the program says it
            await asyncio.sleep(0.02)
    cancelled = [one.call.target for one in silent.calls if isinstance(one.call, CancelCall)]
    # Its own working set, 1, is not made either by an engine that is silent.
    assert cancelled == [999, 1]
    running.cancel()


async def test_others_have_their_turn_while_a_program_floods_its_host(silent: SilentEngine) -> None:
    turns = 0
    read = [0]

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    running = await silent.start(
        """
        from pie.wire.programs import CancelCall

        async def main(ctx):
            connection = ctx.connection()
            for call in range(20_000):
                connection.tell(CancelCall(call, 7))
            await ctx.listen()
        """
    )
    cancel = running.calls.cancel

    def counted(call: int) -> bool:
        read[0] += 1
        return cancel(call)

    running.calls.cancel = counted  # type: ignore[method-assign]
    other = asyncio.create_task(others())
    async with asyncio.timeout(_ENDS_S):
        while read[0] < 20_000:  # noqa: ASYNC110 - the program's messages are read
            await asyncio.sleep(0)
    other.cancel()
    assert turns >= 20_000 // 64


async def test_calls_that_fail_or_are_not_answered_are_counted_to_the_end(
    local: LocalEngine,
) -> None:
    counted: list[int] = []
    inner = local.host
    take = inner.take

    def noted(answers: object) -> None:
        take(answers)  # type: ignore[arg-type]
        counted.extend(len(one.calls) for one in inner._programs.values())

    inner.take = noted  # type: ignore[method-assign]
    try:
        ran = await run(
            local,
            """
            from pie.inferlet import BadCallError
            from pie.wire.programs import CloseSet, OpenSet

            async def main(ctx):
                connection = ctx.connection()
                for call in range(1_000, 1_100):
                    connection.tell(OpenSet(call, 1))
                    connection.tell(CloseSet(call + 5_000, 700))
                for one in range(100):
                    ctx.new_working_set().close()
                while True:
                    try:
                        await ctx.working_set.compact()
                    except BadCallError:
                        continue  # of what was told above
                    return "done"
            """,
        )
    finally:
        del inner.take
    assert ran.result == "done"
    assert counted[-1] == 0
    assert max(counted) <= under_way.MOST_CALLS


async def test_a_call_counts_what_its_answer_will_take(local: LocalEngine) -> None:
    model = local.host._facts
    one = size_of(OpenSet(1, 1), (), model)
    frames = [bytes(400)]
    everything = size_of(RunPass(1, (PassInput(1, logits=Rows.ALL),)), frames, model)
    last = size_of(RunPass(1, (PassInput(1, logits=Rows.LAST),)), frames, model)
    assert everything - one - 400 == 100 * 4 * model.vocab_size
    assert last - one - 400 == 4 * model.vocab_size
    assert size_of(RunPass(1, (PassInput(1, scores=1),)), frames, model) > last
    assert size_of(DropSlots(1, 1), (), model) - one == 4 * model.context_tokens
    generated = size_of(GenerateTokens(1, 1, 10), (), model)
    assert one < generated < size_of(GenerateTokens(1, 1, 1 << 60), (), model) < 1 << 30


async def test_one_call_larger_than_all_may_be_is_carried_alone() -> None:
    calls = CallsUnderWay()
    assert await calls.begin(1, under_way.MOST_BYTES + 1)
    waiting = asyncio.create_task(calls.begin(2, 1))
    with pytest.raises(ValueError, match="call 1 is under way"):
        await calls.begin(1, -under_way.MOST_BYTES)
    calls.end(3)
    await asyncio.sleep(0)
    assert not waiting.done()
    calls.end(1)
    assert await waiting
    assert (len(calls), calls.bytes) == (1, 1)

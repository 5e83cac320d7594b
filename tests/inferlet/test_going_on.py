"""Programs that go on after a call failed or a wait was cancelled: they and the engine agree about slots."""

from __future__ import annotations

import json

import pytest

from pie.worker.programs.local import LocalEngine
from tests.inferlet.running import run

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize("sampler", ["greedy()", "lambda logits: int(logits.argmax())"])
async def test_an_answer_that_was_cancelled_is_gone_on_from(
    local: LocalEngine, sampler: str
) -> None:
    ran = await run(
        local,
        f"""
        import asyncio, json
        from pie.inferlet import Context, ForwardPass, greedy

        async def main(ctx: Context):
            ctx.fill(await ctx.encode("a b c d"))
            gen = ctx.generate({sampler}, max_tokens=1500, ignore_eos=True)

            async def whole():
                return await gen

            task = asyncio.ensure_future(whole())
            while len(gen.tokens) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
            try:
                await task
                raise AssertionError("was not cancelled")
            except asyncio.CancelledError:
                pass
            ws, left = ctx.working_set, await ctx.take_tokens()
            assert len(gen.tokens) < 1500
            assert left == gen.tokens[-1:]
            expected = ws.length
            result = await ctx.pipeline().run(ForwardPass(ws).input(left))
            return json.dumps([expected, result.first_slot, ws.length, 4 + len(gen.tokens)])
        """,
    )
    expected, first, length, whole = json.loads(ran.result)
    assert expected == first
    assert length == first + 1
    assert length >= whole


async def test_passes_behind_one_that_fails_take_the_slots_that_it_leaves(
    local: LocalEngine,
) -> None:
    ran = await run(
        local,
        """
        import json
        from pie.inferlet import BadCallError, Context, ForwardPass, NeverWrittenError

        async def main(ctx: Context):
            ws, pipe = ctx.working_set, ctx.pipeline()
            await pipe.run(ForwardPass(ws).input([3, 4, 5]))
            fails = pipe.submit(ForwardPass(ws).input([6, 7]).mask([90]))
            goes_well = pipe.submit(ForwardPass(ws).input([8]))
            fork = ws.fork()
            ahead = [ws.length, fork.length]
            try:
                await fails
            except NeverWrittenError:
                pass
            (result,) = await goes_well
            try:
                pipe.submit(ForwardPass(ws).input([9]), ForwardPass(ws))
            except BadCallError:
                pass
            (more,) = await pipe.submit(ForwardPass(fork).input([9]))
            await ws.drop([1])
            return json.dumps([ahead, result.first_slot, ws.slots.tolist(), ws.length,
                               more.first_slot, fork.slots.tolist()])
        """,
    )
    assert json.loads(ran.result) == [[6, 6], 3, [0, 2, 3], 4, 4, [0, 1, 2, 3, 4]]

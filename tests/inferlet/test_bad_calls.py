"""What a program gets wrong is an error where it made the call; the program, and its working sets, go on."""

from __future__ import annotations

import json

import pytest

from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import EndReason
from tests.inferlet.running import run

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLD = """
    import asyncio, json
    from pie.inferlet import BadCallError, ForwardPass, InferletError, Sampler, StateGeometry

    async def told(call):
        try:
            found = call()
            if asyncio.iscoroutine(found) or hasattr(found, "__await__"):
                await found
        except BadCallError as error:
            return str(error)
        return "went"
    """


async def test_numbers_that_are_not_whole_or_need_more_than_32_bits(local: LocalEngine) -> None:
    ran = await run(
        local,
        TOLD
        + """
    async def main(ctx):
        ws, p = ctx.working_set, ctx.pipeline()
        await p.run(ForwardPass(ws).input(range(9, 29)))
        one = lambda: ForwardPass(ws).input([5])
        calls = (
            lambda: ws.drop([2**32 + 3]), lambda: ws.drop([1.7]), lambda: ws.drop([-1]),
            lambda: ws.drop([2**70]), lambda: ws.drop([True]), lambda: ctx.fill([2**32 + 5]),
            lambda: p.run(ForwardPass(ws).input([2**32 + 5])), lambda: p.run(ForwardPass(ws).input([1.5])),
            lambda: p.run(ForwardPass(ws).input([5], positions=[2**32 + 1])),
            lambda: p.run(one().mask([[0] * 20 + [1]])), lambda: p.run(one().mask([2**32])),
            lambda: p.run(one().logprobs([-4])), lambda: ctx.decode([-1]),
            lambda: p.run(ForwardPass(StateGeometry(ws, read=[0.5])).input([5])),
        )
        return json.dumps([*[await told(call) for call in calls], ws.length, len(ws.slots)])
    """,
    )
    *told, length, live = json.loads(ran.result)
    assert "went" not in told
    assert told[2] == "slots are from 0 to 4294967295, not -1"
    assert (length, live) == (20, 20)


async def test_what_is_of_another_type(local: LocalEngine) -> None:
    ran = await run(
        local,
        TOLD
        + """
    async def main(ctx):
        ws, p = ctx.working_set, ctx.pipeline()
        await p.run(ForwardPass(ws).input(range(9, 29)))
        answer = lambda *a, **k: ctx.fill([5]).generate(*a, **k)._all()
        calls = (
            lambda: answer(Sampler(temperature="0.7"), 3), lambda: answer(Sampler(top_k=1.5), 3),
            lambda: answer(Sampler(logit_bias={"a": 1}), 3), lambda: answer(Sampler(), "3"),
            lambda: answer(Sampler(), 3, [5]), lambda: answer(Sampler(), 2**70),
            lambda: ctx.say(5), lambda: ctx.say(chr(0xd800)), lambda: ctx.encode(b"bytes"),
            lambda: ctx.say("x" * (65 << 20)), lambda: answer(Sampler(), 3, grammar=5),
            lambda: p.run(ForwardPass(StateGeometry(ws, write=1.5)).input([5])),
            lambda: p.run(ForwardPass(ws).input([5]).scores("1")),
            lambda: p.run(ForwardPass(ws).input([5]).logprobs(top=2.5)),
        )
        went = [await told(call) for call in calls]
        return json.dumps([*went, ws.length, len(await ctx.encode("It goes on."))])
    """,
    )
    *told, length, tokens = json.loads(ran.result)
    assert "went" not in told
    assert "temperature" in told[0]
    assert length == 20
    assert tokens


async def test_a_pass_of_many_sequences_that_ask_for_much_runs(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import ForwardPass
        async def main(ctx):
            ws, p = ctx.new_working_set(), ctx.pipeline()
            await p.run(ForwardPass(ws).input([9] * 16))
            asked = lambda one: ForwardPass(one).input([9]).logits().hidden().scores().logprobs([4], top=2)
            return len(await p.run(*map(asked, ws.forks(220))))
        """,
    )
    assert ran.result == "220"


async def test_scores_of_a_pass_are_bounded_over_its_sequences(local: LocalEngine) -> None:
    ran = await run(
        local,
        TOLD
        + """
    async def main(ctx):
        ws, p = ctx.new_working_set(), ctx.pipeline()
        await p.run(ForwardPass(ws).input([9] * 992))
        forks = ws.forks(4000)
        return await told(lambda: p.run(*(ForwardPass(one).input([9]).scores(1) for one in forks)))
    """,
    )
    assert ran.result == "the scores of this pass would take more than 64 MiB"


@pytest.mark.parametrize(
    ("body", "reason", "said"),
    [
        ("return chr(0xd800)", EndReason.FINISHED, "\\ud800"),
        ("raise ValueError(chr(0xd800))", EndReason.RAISED, "\\ud800"),
        ("return 'x' * (70 << 20)", EndReason.TOO_MUCH_OUTPUT, "returned more than"),
        (
            "ctx.connection()._pipe._writer.write(bytes(range(1, 99)))\n    await ctx.listen()",
            EndReason.DIED,
            "no message",
        ),
        ("return " + "-" * 300_000 + "1", EndReason.RAISED, "program.py is nested too deeply"),
    ],
)
async def test_an_end_that_cannot_be_told_as_it_is(
    local: LocalEngine, body: str, reason: EndReason, said: str
) -> None:
    ended = (await run(local, f"async def main(ctx):\n    {body}\n")).ended
    assert ended.reason is reason
    assert said in ended.result + ended.error
    assert "site-packages" not in ended.error
    assert "pie/inferlet" not in ended.error


async def test_the_fork_of_a_closed_working_set_names_that_one(local: LocalEngine) -> None:
    ran = await run(
        local,
        TOLD
        + """
    async def main(ctx):
        ws = ctx.new_working_set()
        ws.close()
        return await told(lambda: ws.fork()) == f"working set {ws.number} is closed"
    """,
    )
    assert ran.result == "True"


async def test_what_is_of_another_kind_is_told_with_what_is_wanted(local: LocalEngine) -> None:
    ran = await run(
        local,
        TOLD
        + """
    from pie.inferlet import greedy

    async def main(ctx):
        fwd = ForwardPass(ctx.working_set)
        calls = (
            lambda: fwd.sample(greedy), lambda: fwd.sample("greedy"), lambda: ForwardPass(ctx),
            lambda: ctx.generate(greedy, 4), lambda: fwd.logits("first"), lambda: fwd.hidden(1),
            lambda: fwd.input(ctx.generate(greedy(), 4)), lambda: ctx.user(ctx.generate(greedy(), 4)),
            lambda: ctx.generate(greedy(), 4, choice="small"), lambda: fwd.mask(5),
            lambda: ForwardPass(StateGeometry(ctx)), lambda: ctx.generate("greedy", 4),
        )
        return json.dumps([await told(call) for call in calls])
    """,
    )
    on = "a pass runs on a working set, such as `ctx.working_set`, or on a StateGeometry of one, not on Context"
    either = "generate takes a Sampler, such as `greedy()`, or a function over logits, not"
    assert json.loads(ran.result) == [
        "sample takes a Sampler, such as `greedy()`, not greedy itself: is `()` missing?",
        "sample takes a Sampler, such as `greedy()`, not 'greedy'",
        on,
        f"{either} greedy itself: is `()` missing?",
        'logits takes "last" or "all", not \'first\'',
        'hidden takes "last" or "all", not 1',
        "tokens are whole numbers, not Generation: is `await` missing?",
        "the text of a turn is a str, not Generation: is `await` missing?",
        "choice is a list of texts, not 'small'",
        "a mask is slot numbers or an array of booleans, not int",
        on,
        f"{either} 'greedy'",
    ]


@pytest.mark.parametrize(
    "what", ["ctx.user('A').generate()", "ctx.encode('A')", "ctx.working_set.seal()"]
)
async def test_a_result_that_was_not_awaited_is_an_error(local: LocalEngine, what: str) -> None:
    ended = (await run(local, f"async def main(ctx):\n    return {what}\n")).ended
    assert ended.reason is EndReason.RAISED
    assert ended.error.startswith("main returned something that was not awaited, of type ")


async def test_a_last_call_that_fails_unheard_is_a_warning(local: LocalEngine) -> None:
    ran = await run(
        local, "async def main(ctx):\n    ctx.working_set.drop([99])\n    return 'done'\n"
    )
    assert ran.result == "done"
    assert ran.ended.error.startswith(
        "warning: a call that nobody awaited failed: NeverWrittenError: "
    )

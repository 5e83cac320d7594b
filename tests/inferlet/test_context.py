"""What a program's author sees: conversations, forks, scores, messages and errors, through real processes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pie.tokens.template import ChatTemplate
from pie.tokens.tokenizer import Tokenizer
from pie.worker.programs.local import LocalEngine
from pie.worker.programs.process import EndReason
from tests.inferlet.running import ENDS_S, run, start, until_idle
from tests.support.masked import masked
from tests.support.program_folder import EOS

pytestmark = pytest.mark.asyncio(loop_scope="session")


def greedy(module: PreTrainedModel, tokens: list[int], count: int) -> list[int]:
    """Return what the reference goes on with."""
    tokens, out = list(tokens), list[int]()
    while len(out) < count and EOS not in out:
        with torch.inference_mode():
            out.append(int(module(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        tokens.append(out[-1])
    return out


def rendered(folder: Path, *turns: tuple[str, str]) -> list[int]:
    template = ChatTemplate.load(folder)
    assert template is not None
    text = template.render([{"role": role, "content": content} for role, content in turns])
    return Tokenizer.load(folder).encode(text)


async def test_generate_gives_the_models_own_answer(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import Context, greedy

        async def main(ctx: Context, prompt: str):
            gen = ctx.system("Be brief.").user(prompt).generate(greedy(), max_tokens=20)
            pieces = [piece async for piece in gen]
            assert "".join(pieces) == gen.text
            assert gen.finish in ("length", "stop")
            print(gen.tokens)
            return gen.text
        """,
        prompt="What is a lighthouse?",
    )
    prompt = rendered(model_folder, ("system", "Be brief."), ("user", "What is a lighthouse?"))
    want = greedy(reference, prompt, 20)
    assert json.loads(ran.ended.output) == want
    assert ran.result == Tokenizer.load(model_folder).decode(want)


async def test_the_next_turn_goes_on_where_the_answer_ended(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import Context, greedy

        async def main(ctx: Context):
            first = await ctx.user("One?").generate(greedy(), max_tokens=6)
            more = await ctx.generate(greedy(), max_tokens=4)
            print(repr(first + more))
            second = await ctx.user("Two?").generate(greedy(), max_tokens=8)
            return second
        """,
    )
    first = greedy(reference, rendered(model_folder, ("user", "One?")), 10)
    answer = Tokenizer.load(model_folder).decode(first)
    assert ran.ended.output.strip() == repr(answer)
    both = rendered(model_folder, ("user", "One?"), ("assistant", answer), ("user", "Two?"))
    # What was generated stays as it was: the text's own tokens may be others.
    prompt = rendered(model_folder, ("user", "One?"))
    tail = Tokenizer.load(model_folder).encode(
        "<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert both[-len(tail) :] == tail
    want = greedy(reference, [*prompt, *first, *tail], 8)
    assert ran.result == Tokenizer.load(model_folder).decode(want)


async def test_an_answer_can_be_stopped_and_gone_on_with(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    ran = await run(
        local,
        """
        import json
        from contextlib import aclosing
        from pie.inferlet import Context, greedy

        async def main(ctx: Context):
            first = ctx.user("Stop?").generate(greedy(), max_tokens=200, ignore_eos=True)
            async with aclosing(aiter(first)) as pieces:
                async for _ in pieces:
                    break
            second = ctx.generate(greedy(), max_tokens=5, ignore_eos=True)
            await second
            assert len(first.tokens) < 200
            return json.dumps([*first.tokens, *second.tokens])
        """,
    )
    got = json.loads(ran.result)
    tokens = rendered(model_folder, ("user", "Stop?"))
    for token in got:
        with torch.inference_mode():
            row = reference(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        assert float(row.max() - row[token]) < 1e-3
        tokens.append(token)


async def test_an_answer_that_is_over_can_be_gone_on_with_and_turns_follow(
    local: LocalEngine,
) -> None:
    ran = await run(
        local,
        """
        import json
        from pie.inferlet import Context, greedy

        async def main(ctx: Context):
            got = [await ctx.user("Size?").generate(greedy(), 8, choice=["small", "large"])]
            got.append(await ctx.generate(greedy(), 4, choice=["s"]))
            got.append(await ctx.user("Sure?").generate(greedy(), 8, choice=["yes", "no"]))
            got.append(await ctx.generate(greedy(), 3, ignore_eos=True))
            (fork,) = await ctx.user("And?").fork(1)
            got.append(await fork.generate(greedy(), 8, choice=["end"]))
            return json.dumps(got)
        """,
    )
    size, more, sure, _, end = json.loads(ran.result)
    assert size in {"small", "large"}
    assert sure in {"yes", "no"}
    assert (more, end) == ("s", "end")


async def test_a_function_over_logits_can_choose(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    ran = await run(
        local,
        """
        import numpy as np
        from pie.inferlet import Context

        async def main(ctx: Context):
            return await ctx.user("Hm?").generate(lambda logits: int(np.argmax(logits)), max_tokens=9)
        """,
    )
    want = greedy(reference, rendered(model_folder, ("user", "Hm?")), 9)
    assert ran.result == Tokenizer.load(model_folder).decode(want)


async def test_forks_share_the_prompt_and_go_their_own_ways(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        import asyncio, json
        from pie.inferlet import Context, Sampler

        async def main(ctx: Context):
            ctx.user("Tell me a story about the sea and the wind. " * 6)
            forks = await ctx.fork(4)
            texts = await asyncio.gather(*(
                fork.generate(Sampler(seed=at), max_tokens=12) for at, fork in enumerate(forks)
            ))
            print(json.dumps([fork.working_set.length for fork in forks]))
            return json.dumps(texts)
        """,
    )
    texts = json.loads(ran.result)
    assert len(set(texts)) == 4
    (first, *others) = json.loads(ran.ended.output)
    assert all(abs(one - first) <= 12 for one in others)


async def test_score_and_embed_are_the_models_own(
    local: LocalEngine, model_folder: Path, reference: PreTrainedModel
) -> None:
    ran = await run(
        local,
        """
        import json
        from pie.inferlet import Context

        async def main(ctx: Context):
            await ctx.user("Where is the keeper?").take_tokens()
            ctx.fill(await ctx.encode("The keeper is"))
            likely = await ctx.score(" in the tower, asleep.")
            again = await ctx.score(" in the tower, asleep.")
            vector = await ctx.embed("a lamp")
            return json.dumps([likely, again, vector.tolist()])
        """,
    )
    likely, again, vector = json.loads(ran.result)
    tokenizer = Tokenizer.load(model_folder)
    before, after = tokenizer.encode("The keeper is"), tokenizer.encode(" in the tower, asleep.")
    tokens = before + after
    logits, _ = masked(reference, tokens, torch.ones(len(tokens), len(tokens), dtype=torch.bool))
    logs = logits.log_softmax(-1)
    want = sum(float(logs[len(before) + at - 1, token]) for at, token in enumerate(after))
    assert likely == pytest.approx(want, rel=1e-4)
    assert again == likely
    ids = torch.tensor([tokenizer.encode("a lamp")])
    with torch.inference_mode():
        hidden = reference.base_model(ids, use_cache=False).last_hidden_state[0, -1]
    assert np.allclose(vector, hidden.numpy(), atol=1e-4)


async def test_a_tokens_own_embedding_says_what_the_token_says(
    local: LocalEngine, reference: PreTrainedModel
) -> None:
    table = reference.get_input_embeddings().weight
    assert isinstance(table, torch.Tensor)
    table = table.detach().float()
    ran = await run(
        local,
        """
        import json
        import numpy as np
        from pie.inferlet import BadCallError, Context, ForwardPass

        async def main(ctx: Context, vectors: str):
            pipe, one, two = ctx.pipeline(), ctx.new_working_set(), ctx.new_working_set()
            given = np.array(json.loads(vectors))
            assert given.shape[1] == ctx.model.hidden_size
            told = await pipe.run(ForwardPass(one).input([10, 11, 12]).logits())
            same = await pipe.run(ForwardPass(two).input(given).logits())
            try:
                await pipe.run(ForwardPass(two).input(given[:, :-1]))
            except BadCallError as error:
                return f"{np.abs(told.logits - same.logits).max():.6f} {error}"
        """,
        vectors=json.dumps(table[10:13].tolist()),
    )
    error, _, told = ran.result.partition(" ")
    assert float(error) < 1e-3
    assert told.startswith("embeddings of 3 tokens are [3, 64]")


async def test_what_is_wrong_with_a_call_is_an_error_that_names_the_slot(
    local: LocalEngine,
) -> None:
    ran = await run(
        local,
        """
        import json
        import numpy as np
        from pie.inferlet import (
            Context, DroppedSlotError, ForwardPass, FrozenPageError, NeverWrittenError,
            NothingAttendedError, StateGeometry, greedy,
        )

        async def main(ctx: Context):
            ws, pipe = ctx.new_working_set(), ctx.pipeline()
            await pipe.run(ForwardPass(ws).input(range(10, 30)))
            slots = []
            for error, call in (
                (NeverWrittenError, lambda: pipe.run(ForwardPass(ws).input([5]).mask([3, 20]))),
                (FrozenPageError, lambda: pipe.run(ForwardPass(StateGeometry(ws, write=7)).input([5]))),
                (NothingAttendedError, lambda: pipe.run(
                    ForwardPass(ws).input([5]).mask(np.zeros((1, 21), np.bool_)))),
                (NeverWrittenError, lambda: ws.drop([99])),
            ):
                try:
                    await call()
                except error as found:
                    slots.append(found.slot)
                assert ws.length == 20, ws.length
            ws.drop([4])
            try:
                await pipe.run(ForwardPass(ws).input([5]).mask([4]))
            except DroppedSlotError as found:
                slots.append(found.slot)
            result = await pipe.run(ForwardPass(ws).input([5]).logprobs(top=3).scores())
            assert len(result.top) == 3
            assert abs(result.scores.sum(-1) - 1).max() < 1e-5
            assert (result.scores[:, :, 4] == 0).all()
            return json.dumps(slots)
        """,
    )
    assert json.loads(ran.result) == [20, 7, 20, 99, 4]


async def test_an_error_that_nobody_waited_for_comes_with_the_next_answer(
    local: LocalEngine,
) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import Context, ForwardPass, NeverWrittenError

        async def main(ctx: Context):
            ws, pipe = ctx.new_working_set(), ctx.pipeline()
            ws.drop([1])
            try:
                await pipe.run(ForwardPass(ws).input([5, 6]))
            except NeverWrittenError as error:
                return f"{error.slot}"
        """,
    )
    assert ran.result == "1"


async def test_passes_can_be_submitted_ahead_and_several_run_together(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        import numpy as np
        from pie.inferlet import Context, ForwardPass

        async def main(ctx: Context):
            one, pipe = ctx.new_working_set(), ctx.pipeline()
            ahead = [pipe.submit(ForwardPass(one).input([at + 9]).logits()) for at in range(12)]
            ((last,),) = [await ahead[-1]]
            two, three = ctx.new_working_set(), ctx.new_working_set()
            whole, other = await pipe.run(
                ForwardPass(two).input(range(9, 21)).logits("all"),
                ForwardPass(three).input(range(40, 52)).logits("last"),
            )
            assert np.abs(whole.logits[-1] - last.logits[0]).max() < 1e-3
            assert other.logits.shape == (1, ctx.model.vocab_size)
            return "same"
        """,
    )
    assert ran.result == "same"


async def test_a_result_is_not_lost_behind_calls_that_nobody_waited_for(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        from pie.inferlet import Context, ForwardPass

        async def main(ctx: Context):
            ws, pipe = ctx.working_set, ctx.pipeline()
            for at in range(200):
                pipe.submit(ForwardPass(ws).input([at + 9]).logits())
                ws.drop([at])
            return "done"
        """,
    )
    assert ran.result == "done"


async def test_a_program_and_its_client_talk(local: LocalEngine) -> None:
    said: list[str] = []
    running = await start(
        local,
        """
        from pie.inferlet import Context

        async def main(ctx: Context):
            heard = []
            while (text := await ctx.listen()) is not None:
                await ctx.say(text.upper())
                heard.append(text)
            return f"{heard} {await ctx.listen()}"
        """,
        said,
    )
    for text in ("a", "b"):
        assert running.tell(text)
    running.tell(None)
    async with asyncio.timeout(ENDS_S):
        ended = await running.ended
    assert said == ["A", "B"]
    assert ended.result == "['a', 'b'] None"


async def test_a_traceback_begins_in_the_program_and_shows_its_lines(local: LocalEngine) -> None:
    ran = await run(
        local,
        """
        async def main(ctx):
            lamp = {}
            return lamp["oil"]
        """,
    )
    assert ran.ended.reason is EndReason.RAISED
    assert ran.ended.error.splitlines()[0] == "Traceback (most recent call last):"
    assert 'File "program.py", line 4, in main' in ran.ended.error
    assert 'lamp["oil"]' in ran.ended.error
    assert "KeyError: 'oil'" in ran.ended.error


async def test_wrong_arguments_are_told_before_anything_runs(local: LocalEngine) -> None:
    ran = await run(local, "async def main(ctx, n: int):\n    return n\n", n="many")
    assert ran.ended.error == "n is of type int, not 'many'"


async def test_pages_are_free_when_a_program_has_ended_and_what_it_computed_stays(
    local: LocalEngine,
) -> None:
    source = """
        from pie.inferlet import Context, greedy

        async def main(ctx: Context):
            ctx.user("The storm came from the west that night, and nobody slept. " * 4)
            await ctx.generate(greedy(), max_tokens=3)
            return ctx.working_set.cached_tokens()
        """
    assert (await run(local, source)).result == "0"
    await until_idle(local)
    assert int((await run(local, source)).result) > 50

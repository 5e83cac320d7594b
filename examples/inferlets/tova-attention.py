"""TOVA (Oren et al. 2024): at each step the slot with the least attention goes.

The attention of the newest token, averaged over layers and heads, is all that counts. A prompt that is longer
than the budget loses what its last token attends to least.
"""

import numpy as np

from pie.inferlet import Context, ForwardPass, Sampler


async def main(
    ctx: Context,
    prompt: str,
    budget: int = 128,
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> str:
    """Answer PROMPT with at most BUDGET slots."""
    tokens = await ctx.user(prompt).take_tokens()
    ws, pipe, sampler = ctx.working_set, ctx.pipeline(), Sampler(temperature)
    answer: list[int] = []
    while len(answer) < max_tokens:
        fwd = ForwardPass(ws).input(tokens).scores(1).sample(sampler, drawn=len(answer))
        result = await pipe.run(fwd)
        assert result.token is not None
        assert result.scores is not None
        answer.append(result.token)
        if result.token in ctx.eos:
            break
        tokens = [result.token]
        live = ws.slots
        if len(live) > budget:
            mass = result.scores.mean((0, 1))[live]
            ws.drop(live[np.argsort(mass, kind="stable")[: len(live) - budget]])
            if ws.pages * ctx.model.page_tokens > 2 * budget:
                ws.compact()
    await ctx.say(f"{ws.length} slots written, {len(ws.slots)} kept in {ws.pages} pages")
    return await ctx.decode(answer)

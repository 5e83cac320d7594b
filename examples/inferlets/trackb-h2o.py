"""H2O (Zhang et al. 2023): recent slots, and those that have been attended to most so far.

Each slot carries the attention that all later tokens paid to it, summed over layers and heads. When there are
more than a budget, the one with the least goes, the newest ones spared.
"""

import numpy as np

from pie.inferlet import Context, ForwardPass, Sampler


async def main(
    ctx: Context,
    prompt: str,
    heavy: int = 64,
    recent: int = 64,
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> str:
    """Answer PROMPT with HEAVY slots that matter and RECENT ones that are new."""
    tokens = await ctx.user(prompt).take_tokens()
    ws, pipe, sampler = ctx.working_set, ctx.pipeline(), Sampler(temperature)
    mass, answer = np.zeros(0), list[int]()
    while len(answer) < max_tokens:
        fwd = ForwardPass(ws).input(tokens).scores(window=len(tokens))
        result = await pipe.run(fwd.sample(sampler, drawn=len(answer)))
        assert result.token is not None
        assert result.scores is not None
        # Scores are a mean over the pass's tokens: this makes them the sum.
        paid = result.scores.sum((0, 1)) * len(tokens)
        mass = np.pad(mass, (0, len(paid) - len(mass))) + paid
        answer.append(result.token)
        if result.token in ctx.eos:
            break
        tokens = [result.token]
        old = ws.slots[:-recent]
        if len(old) > heavy:
            ws.drop(old[np.argsort(mass[old], kind="stable")[: len(old) - heavy]])
            if ws.pages * ctx.model.page_tokens > 2 * (heavy + recent):
                ws.compact()
    await ctx.say(f"{ws.length} slots written, {len(ws.slots)} kept in {ws.pages} pages")
    return await ctx.decode(answer)

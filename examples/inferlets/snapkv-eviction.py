"""SnapKV (Li et al. 2024): keep the prompt slots that the end of the prompt attends to.

The last tokens of the prompt are an observation window. The attention that they pay to each earlier slot, summed over
layers and heads and smoothed over neighbours, says which slots stay. The rest is dropped once, before
the answer begins, and its memory comes back.
"""

import numpy as np

from pie.inferlet import Context, ForwardPass, Sampler


async def main(
    ctx: Context,
    prompt: str,
    keep: float = 0.25,
    window: int = 16,
    kernel: int = 5,
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> str:
    """Answer PROMPT from a share KEEP of its slots."""
    tokens = await ctx.user(prompt).take_tokens()
    ws, pipe = ctx.working_set, ctx.pipeline()
    window = min(window, len(tokens) - 1)
    # All but the last token, which the answer begins with.
    result = await pipe.run(ForwardPass(ws).input(tokens[:-1]).scores(window))
    assert result.scores is not None
    before = ws.length - window
    mass = result.scores.sum((0, 1))[:before]
    smooth = np.convolve(mass, np.ones(kernel) / kernel, "same")
    budget = max(1, int(keep * len(tokens)) - window)
    if budget < before:
        ws.drop(np.argsort(-smooth, kind="stable")[budget:])
        await ws.compact()
    await ctx.say(f"{len(ws.slots)} of {ws.length} slots kept, in {ws.pages} pages")
    return await ctx.fill(tokens[-1:]).generate(Sampler(temperature), max_tokens)

"""Contrastive decoding by context (Shi et al. 2023): say what the document makes likelier.

Two working sets take the same tokens, one after the document and the question, one after the question alone. The next
token is the one with the largest (1 + alpha) × logits with the document − alpha × logits without it, among those
that are likely enough with it. What the model would say anyway counts less.
"""

import numpy as np

from pie.inferlet import Context, ForwardPass


async def main(
    ctx: Context,
    document: str,
    prompt: str,
    alpha: float = 0.5,
    plausible: float = 0.1,
    max_tokens: int = 48,
) -> str:
    """Answer PROMPT from DOCUMENT rather than from memory."""
    pipe, bare = ctx.pipeline(), ctx.new_context()
    feed = [
        await ctx.user(f"{document}\n\n{prompt}").take_tokens(),
        await bare.user(prompt).take_tokens(),
    ]
    answer: list[int] = []
    changed = 0
    while len(answer) < max_tokens:
        passes = [
            ForwardPass(one.working_set).input(tokens).logits()
            for one, tokens in zip((ctx, bare), feed, strict=True)
        ]
        results = await pipe.submit(*passes)
        logits = [one.logits[0].astype(np.float64) for one in results if one.logits is not None]
        with_document, without = logits
        likely = with_document >= with_document.max() + np.log(plausible)
        scores = np.where(likely, (1 + alpha) * with_document - alpha * without, -np.inf)
        token = int(scores.argmax())
        changed += token != int(with_document.argmax())
        answer.append(token)
        if token in ctx.eos:
            break
        feed = [[token], [token]]
    await ctx.say(f"{changed} of {len(answer)} tokens are not what the model would have said")
    return await ctx.decode(answer)

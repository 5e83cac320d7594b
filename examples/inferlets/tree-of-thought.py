"""Tree of thought (Yao et al. 2023): several next steps, the best few are gone on with.

A thought is a fork that writes one step. A fork of each then says how good it is: the likelihood of "yes" against "no"
as the answer to whether this will lead to a solution. What all thoughts have in common is computed once.
"""

import asyncio

from pie.inferlet import Context, Sampler

Thought = tuple[float, str, Context]
ASK = "Will this lead to a right answer? Answer yes or no."


async def value(thought: Context) -> float:
    """Return how much likelier a yes is than a no, as a difference of log-likelihoods."""
    (judge,) = await thought.fork(1)
    judge.user(ASK)
    yes, no = await judge.score("yes"), await judge.score("no")
    judge.close()
    return yes - no


async def main(
    ctx: Context,
    prompt: str,
    depth: int = 2,
    branches: int = 3,
    keep: int = 2,
    step_tokens: int = 40,
    max_tokens: int = 64,
    seed: int = 0,
) -> str:
    """Answer PROMPT after DEPTH steps; of BRANCHES thoughts for each, the best KEEP live on."""
    ctx.system("Think step by step. Write one short step at a time.").user(prompt)
    kept: list[Thought] = [(0.0, "", ctx)]
    for level in range(depth):
        if level:
            for _, _, one in kept:
                one.user("Go on.")
        forks = [fork for _, _, one in kept for fork in await one.fork(branches)]
        for _, _, one in kept:
            one.close()
        texts = await asyncio.gather(
            *(
                fork.generate(Sampler(0.8, seed=seed + 1000 * level + at), step_tokens, ["\n"])
                for at, fork in enumerate(forks)
            )
        )
        values = await asyncio.gather(*map(value, forks))
        thoughts = sorted(zip(values, texts, forks, strict=True), key=lambda one: -one[0])
        kept, lost = thoughts[:keep], thoughts[keep:]
        for _, _, one in lost:
            one.close()
        await ctx.say(f"step {level + 1}, {kept[0][0]:+.2f}: {kept[0][1].strip()}")
    best = kept[0][2]
    return await best.user("Now give the answer.").generate(Sampler(0.0), max_tokens)

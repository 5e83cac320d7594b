"""Self-consistency (Wang et al. 2022): many answers, and the one that most of them agree on.

The prompt is computed once; every answer is a fork of it.
"""

import asyncio
import re
from collections import Counter

from pie.inferlet import Context, Sampler


async def main(
    ctx: Context,
    prompt: str,
    answers: int = 8,
    pattern: str = "-?[0-9]+",
    max_tokens: int = 96,
    temperature: float = 0.7,
    seed: int = 0,
) -> str:
    """Answer PROMPT by vote: the last match of PATTERN in each of ANSWERS texts, or else the whole text."""
    forks = await ctx.user(prompt).fork(answers)
    texts = await asyncio.gather(
        *(
            fork.generate(Sampler(temperature, seed=seed + at), max_tokens)
            for at, fork in enumerate(forks)
        )
    )
    found: list[str] = [(re.findall(pattern, text) or [text.strip()])[-1] for text in texts]
    votes = Counter(found)
    for answer, count in votes.most_common(5):
        await ctx.say(f"{count} of {answers}: {answer}")
    return votes.most_common(1)[0][0]

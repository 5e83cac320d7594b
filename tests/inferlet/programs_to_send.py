"""Programs that tests send to a cluster."""

from __future__ import annotations

import asyncio
import sys

from pie.inferlet import Context, ForwardPass, greedy

_LOUDER = str.upper


async def answer(ctx: Context, prompt: str, max_tokens: int = 4) -> str:
    """Answer PROMPT."""
    gen = ctx.user(prompt).generate(greedy(), max_tokens)
    await gen
    sys.stdout.write("printed\n")
    sys.stdout.flush()
    await ctx.say(f"{ctx.working_set.cached_tokens()}")
    return gen.text


async def echo(ctx: Context) -> int:
    """Say what is heard, louder."""
    heard = 0
    while (text := await ctx.listen()) is not None:
        await ctx.say(_LOUDER(text))
        heard += 1
    return heard


async def wait(ctx: Context) -> None:
    """Hold pages and wait for ever."""
    await ctx.pipeline().run(ForwardPass(ctx.working_set).input(range(9, 100)))
    await ctx.say("holding")
    await asyncio.sleep(1000)


async def fail(ctx: Context) -> None:
    """Raise."""
    raise ValueError("as it should")


async def much(ctx: Context, size: int) -> str:
    """Print, say and return much."""
    sys.stdout.write("p" * size)
    sys.stdout.flush()
    await ctx.say("s" * size)
    return "r" * size

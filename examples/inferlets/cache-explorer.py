"""Shows what prompts share: how many of their tokens were there already when they came.

Texts are separated by `|`. Each is run on a working set of its own, the old ones being closed; frozen pages stay,
under names made of their tokens, as long as there is room.
"""

from pie.inferlet import Context, ForwardPass


async def main(ctx: Context, prompt: str) -> str:
    """Run each text in PROMPT and tell how much of it came from pages."""
    total = shared = 0
    pipe, size = ctx.pipeline(), ctx.model.page_tokens
    for text in (part.strip() for part in prompt.split("|")):
        tokens = await ctx.encode(text, special=True)
        if not tokens:
            continue
        ws = ctx.new_working_set()
        await pipe.run(ForwardPass(ws).input(tokens))
        cached = ws.cached_tokens()
        await ctx.say(
            f"{cached:>6} of {len(tokens):>6} tokens, {cached // size:>4} of {len(tokens) // size:>4} "
            f"full pages: {text[:50]}"
        )
        total, shared = total + len(tokens), shared + cached
        ws.close()
    return f"{shared} of {total} tokens came from pages"

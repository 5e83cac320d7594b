"""Speculative decoding with n-grams: guess what comes from what was there, check it in one pass.

Where the last few tokens have occurred before, what followed them then is the guess. One pass runs all of it; what
the model would have said itself is accepted, the slots of the rest are dropped. The text is what greedy
decoding gives, in fewer passes.
"""

from pie.inferlet import Context, ForwardPass


def guess(tokens: list[int], ngram: int, most: int) -> list[int]:
    """Return what followed the last time that the last `ngram` tokens occurred."""
    tail = tokens[-ngram:]
    for at in range(len(tokens) - ngram - 1, -1, -1):
        if tokens[at : at + ngram] == tail:
            return tokens[at + ngram : at + ngram + most]
    return []


async def main(
    ctx: Context, prompt: str, max_tokens: int = 96, ngram: int = 2, draft: int = 5
) -> str:
    """Answer PROMPT greedily, guessing up to DRAFT tokens at a time."""
    tokens = await ctx.user(prompt).take_tokens()
    ws, pipe = ctx.working_set, ctx.pipeline()
    start, passes, accepted = len(tokens), 0, 0
    feed, guessed = list(tokens), list[int]()
    while len(tokens) - start < max_tokens and not ctx.eos & set(tokens[start:]):
        position = len(tokens) - len(feed)
        # Only the last token and the guesses need logits: the prompt goes ahead by itself.
        ahead, feed = feed[:-1], feed[-1:]
        if ahead:
            pipe.submit(ForwardPass(ws).input(ahead))
        position += len(ahead)
        fwd = ForwardPass(ws).input([*feed, *guessed], range(position, position + 1 + len(guessed)))
        result = await pipe.run(fwd.logits("all"))
        assert result.logits is not None
        said = [int(row.argmax()) for row in result.logits]
        right = 0
        while right < len(guessed) and guessed[right] == said[right]:
            right += 1
        if right < len(guessed):
            ws.drop(range(ws.length - len(guessed) + right, ws.length))
        tokens += said[: right + 1]
        passes, accepted = passes + 1, accepted + right
        feed, guessed = tokens[-1:], guess(tokens, ngram, draft)
    answer = tokens[start : start + max_tokens]
    ends = [at for at, token in enumerate(answer) if token in ctx.eos]
    answer = answer[: ends[0]] if ends else answer
    await ctx.say(f"{len(answer)} tokens in {passes} passes, {accepted} of them guessed")
    return await ctx.decode(answer)

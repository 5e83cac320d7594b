"""Beam search: the likeliest whole text, not the likeliest next token.

Beams are forks: they share all frozen pages, and one that is not gone on with is closed. All of them take their
step in one pass.
"""

from pie.inferlet import Context, ForwardPass, WorkingSet


async def main(ctx: Context, prompt: str, width: int = 4, max_tokens: int = 32) -> str:
    """Answer PROMPT with the best of WIDTH beams, by log-likelihood."""
    tokens = await ctx.user(prompt).take_tokens()
    pipe = ctx.pipeline()
    first = await pipe.run(ForwardPass(ctx.working_set).input(tokens).logprobs(top=width))
    beams: list[tuple[float, list[int], WorkingSet]] = []
    done: list[tuple[float, list[int]]] = []
    starts = list(first.top)
    for (token, logprob), one in zip(starts, ctx.working_set.forks(len(starts)), strict=True):
        beams.append((logprob, [token], one))
    ctx.close()
    for _ in range(max_tokens - 1):
        done += [(score, text) for score, text, _ in beams if text[-1] in ctx.eos]
        for _, text, one in beams:
            if text[-1] in ctx.eos:
                one.close()
        beams = [beam for beam in beams if beam[1][-1] not in ctx.eos]
        if not beams:
            break
        passes = [ForwardPass(one).input([text[-1]]).logprobs(top=width) for _, text, one in beams]
        results = await pipe.submit(*passes)
        options = [
            (score + logprob, at, token)
            for at, ((score, _, _), result) in enumerate(zip(beams, results, strict=True))
            for token, logprob in result.top
        ]
        options.sort(key=lambda option: -option[0])
        best = options[: width - len(done)]
        grown: list[tuple[float, list[int], WorkingSet]] = []
        for at, (_, text, one) in enumerate(beams):
            own = [option for option in best if option[1] == at]
            sets = [one, *one.forks(len(own) - 1)] if own else []
            if not own:
                one.close()
            for (score, _, token), target in zip(own, sets, strict=True):
                grown.append((score, [*text, token], target))
        beams = grown
        if not beams:
            break
    done += [(score, text) for score, text, _ in beams]
    score, text = max(done, key=lambda one: one[0])
    await ctx.say(f"log-likelihood {score:.3f}, best of {len(done)}")
    return await ctx.decode(text)

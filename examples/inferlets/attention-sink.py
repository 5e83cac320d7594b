"""Attention sink and sliding window (StreamingLLM, Xiao et al. 2023).

The first few slots and the newest ones stay, whatever is between them is dropped as the text grows: memory
and time per token stay the same however long it gets.
"""

from pie.inferlet import Context, ForwardPass, Sampler


async def main(
    ctx: Context,
    prompt: str,
    sinks: int = 4,
    window: int = 252,
    max_tokens: int = 256,
    temperature: float = 0.0,
) -> str:
    """Answer PROMPT with at most SINKS + WINDOW slots of memory."""
    tokens = await ctx.user(prompt).take_tokens()
    ws, pipe, sampler = ctx.working_set, ctx.pipeline(), Sampler(temperature)
    answer: list[int] = []
    while len(answer) < max_tokens:
        fwd = ForwardPass(ws).input(tokens).sample(sampler, drawn=len(answer))
        result = await pipe.run(fwd)
        assert result.token is not None
        answer.append(result.token)
        if result.token in ctx.eos:
            break
        tokens = [result.token]
        middle = ws.slots[sinks:-window]
        if len(middle):
            ws.drop(middle)
    await ctx.say(f"{ws.length} slots written, {len(ws.slots)} kept in {ws.pages} pages")
    return await ctx.decode(answer)

"""Several questions over one document: the document is computed once, each question is a branch.

What a branch has before its question is shared, page by page, with all the others.
"""

import asyncio

from pie.inferlet import Context, Sampler


async def main(ctx: Context, document: str, questions: str, max_tokens: int = 48) -> str:
    """Answer QUESTIONS, separated by `|`, over DOCUMENT."""
    asked = [question.strip() for question in questions.split("|") if question.strip()]
    branches = await ctx.system(document).fork(len(asked))
    shared = ctx.working_set.length

    async def answer(branch: Context, question: str) -> str:
        return await branch.user(question).generate(Sampler(temperature=0), max_tokens)

    answers = await asyncio.gather(*map(answer, branches, asked))
    lengths = [branch.working_set.length for branch in branches]
    await ctx.say(
        f"{shared} tokens computed once for {len(asked)} branches; they saved {shared * (len(asked) - 1)}"
    )
    await ctx.say(f"each branch has {', '.join(map(str, lengths))} tokens")
    return "\n".join(f"{one}\n  {said}" for one, said in zip(asked, answers, strict=True))

"""Constrained decoding: the answer is JSON that a schema describes, whatever the model would rather say.

The engine leaves out every token that the schema forbids before it draws. `regex`, `choice` and `grammar` (Lark) go
the same way.
"""

import json

from pie.inferlet import Context, Sampler


async def main(
    ctx: Context,
    prompt: str,
    schema: str = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 24}, '
    '"count": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["name", "count"], '
    '"additionalProperties": false}',
    max_tokens: int = 128,
    temperature: float = 0.0,
) -> str:
    """Answer PROMPT with JSON that SCHEMA describes."""
    wanted = json.loads(schema)
    ctx.user(f"{prompt}\nAnswer with JSON that matches this schema: {schema}")
    answer = ctx.generate(Sampler(temperature), max_tokens, schema=wanted)
    text = await answer
    if answer.finish == "length":
        raise ValueError(f"no whole answer within {max_tokens} tokens: {text}")
    await ctx.say(f"{len(answer.tokens)} tokens, fields {', '.join(json.loads(text))}")
    return text

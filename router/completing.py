"""Prompts that are no conversations, and how their answers begin with them.

Covers token ids of texts, and the text of an echo, also where only a prompt's last tokens are kept. Does not
cover bodies and how an echo is told (`pie.router.api.completions`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pie.router.api.completions import Echo
from pie.router.models import ServedModel
from pie.router.prompt import Prompt
from pie.tokens.tokenizer import Tokenizer

_ECHOED_HERE = 4096
"""Tokens of prompts that are spelled on the event loop, at 0.3 µs each."""


async def plain(
    model: ServedModel, prompts: Sequence[str | Sequence[int]], keep: int | None, tenant: str
) -> list[Prompt]:
    """Return prompts that are no conversations; streams have a turn between them."""
    maker, room = model.prompts, model.context_tokens
    made: list[Prompt] = []
    for asked in prompts:
        if made:
            await asyncio.sleep(0)
        if isinstance(asked, str):
            made.append(await maker.text(asked, context_tokens=room, keep=keep, tenant=tenant))
        else:
            size = model.vocab_size
            made.append(maker.tokens(asked, context_tokens=room, vocab_size=size, keep=keep))
    return made


async def echoes_of(
    model: ServedModel,
    asked: Sequence[str | Sequence[int]],
    prompts: Sequence[Prompt],
    keep: int | None,
    tenant: str,
) -> list[Echo]:
    """Return the echoes of prompts; those of many tokens are spelled in a thread."""

    def spell() -> list[Echo]:
        return [
            echo(model.prompts.tokenizer, one, prompt.ids, keep)
            for one, prompt in zip(asked, prompts, strict=True)
        ]

    tokens = sum(len(prompt.ids) for prompt in prompts)
    return await model.prompts.run(tokens > _ECHOED_HERE, spell, tenant)


def echo(
    tokenizer: Tokenizer, asked: str | Sequence[int], ids: Sequence[int], keep: int | None
) -> Echo:
    """Return the echo of the prompt `ids`, the last `keep` tokens of what was asked for."""
    first = tokenizer.token_bytes(ids[0])
    if keep is not None and len(ids) == keep:
        # Token by token, as their log-probabilities are told: decoded together, they may lose a blank.
        kept = b"".join(map(tokenizer.token_bytes, ids)).decode(errors="replace")
        whole = kept.endswith(asked) if isinstance(asked, str) else len(asked) == keep
        if not whole:
            return Echo(kept, first)
    text = asked if isinstance(asked, str) else tokenizer.decode(asked, skip_special_tokens=False)
    return Echo(text, first)

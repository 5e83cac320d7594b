"""A prompt as its answers begin with it.

Covers its text, also where only its last tokens are kept. Does not cover how it is told
(`pie.router.api.completions`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pie.router.api.completions import Echo
from pie.tokens.tokenizer import Tokenizer


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

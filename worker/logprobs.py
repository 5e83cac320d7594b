"""Log-probabilities of drawn tokens and their rivals.

They are the model's own: before bias, penalties, temperature and truncation, as OpenAI's API
reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from pie.wire.messages import PositionLogprobs, TokenLogprob

TokenBytes = Callable[[int], bytes]


def position_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], tops: Sequence[int], token_bytes: TokenBytes
) -> list[PositionLogprobs]:
    """Return the log-probabilities of one drawn token for each row.

    Args:
        logits: float32 `[rows, vocab]`, as the model gave them.
        tokens: The token drawn from each row.
        tops: How many of the likeliest tokens each row reports.
        token_bytes: Spells a token.
    """
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    most = min(max(tops, default=0), logits.shape[-1])
    values, ids = logprobs.topk(most, dim=-1)
    return [
        PositionLogprobs(
            TokenLogprob(token, token_bytes(token), logprob),
            tuple(
                TokenLogprob(rival, token_bytes(rival), value)
                for rival, value in zip(row_ids[:top], row_values[:top], strict=True)
            ),
        )
        for token, logprob, top, row_ids, row_values in zip(
            tokens, chosen, tops, ids.tolist(), values.tolist(), strict=True
        )
    ]

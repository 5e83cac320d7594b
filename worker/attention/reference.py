"""Attention over pages as the rules say it, in float64 and one token at a time.

What backends are measured against; slow on purpose, and it shares no code with any of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pie.worker.attention.protocol import AttentionSpec, Span


def attend(
    spec: AttentionSpec,
    spans: Sequence[Span],
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return outputs `[rows, query_heads, value_dim]` and, for each span, its scores.

    Args:
        spec: The layer's attention.
        spans: The step.
        query: `[rows, query_heads, key_dim]`
        keys: The arena's, `[pages, page_tokens, kv_heads, key_dim]`.
        values: The arena's, `[pages, page_tokens, kv_heads, value_dim]`.
    """
    page_tokens = keys.shape[1]
    out = torch.zeros((query.shape[0], spec.query_heads, spec.value_dim), dtype=torch.float64)
    all_scores: list[torch.Tensor] = []
    for span in spans:
        scores = torch.zeros((spec.query_heads, span.end), dtype=torch.float64)
        for token in range(span.tokens):
            own = span.start + token
            seen = [
                slot
                for slot in range(own + 1)
                if (spec.window is None or slot > own - spec.window)
                and (span.mask is None or bool(span.mask[token, slot]))
            ]
            if not seen:
                continue
            pages = [span.page_ids[slot // page_tokens] for slot in seen]
            offsets = [slot % page_tokens for slot in seen]
            for head in range(spec.query_heads):
                kv_head = head // spec.group
                k = keys[pages, offsets, kv_head].cpu().double()
                v = values[pages, offsets, kv_head].cpu().double()
                q = query[span.first_row + token, head].cpu().double()
                logits = (k @ q) * spec.scaling
                if spec.softcap is not None:
                    logits = torch.tanh(logits / spec.softcap) * spec.softcap
                weights = torch.softmax(logits, 0)
                out[span.first_row + token, head] = weights @ v
                if token >= span.tokens - span.scores_queries:
                    scores[head, seen] += weights
        all_scores.append(scores)
    return out, all_scores

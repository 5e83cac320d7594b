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
    *,
    layer: int = 0,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return outputs `[rows, query_heads, value_dim]` and, for each span, its scores.

    Args:
        spec: The layer's attention.
        spans: The step.
        query: `[rows, query_heads, key_dim]`
        keys: The arena's, `[pages, page_tokens, kv_heads, key_dim]`.
        values: The arena's, `[pages, page_tokens, kv_heads, value_dim]`.
        layer: Which of a mask's layers.
    """
    page_tokens = keys.shape[1]
    out = torch.zeros((query.shape[0], spec.query_heads, spec.value_dim), dtype=torch.float64)
    all_scores: list[torch.Tensor] = []
    for span in spans:
        scores = torch.zeros((spec.query_heads, span.end), dtype=torch.float64)
        for token in range(span.tokens):
            own = span.start + token
            for head in range(spec.query_heads):
                seen = [
                    slot
                    for slot in range(own + 1)
                    if (spec.window is None or slot > own - spec.window)
                    and _allows(span.mask, layer, head, token, slot)
                ]
                if not seen:
                    continue
                pages = [span.page_ids[slot // page_tokens] for slot in seen]
                offsets = [slot % page_tokens for slot in seen]
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


def _allows(mask: torch.Tensor | None, layer: int, head: int, token: int, slot: int) -> bool:
    if mask is None:
        return True
    if mask.ndim == 2:
        return bool(mask[token, slot])
    layers, heads = mask.shape[:2]
    return bool(mask[min(layer, layers - 1), min(head, heads - 1), token, slot])

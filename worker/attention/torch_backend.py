"""Attention over pages in plain torch: any device, any dtype, masks and scores.

Covers three ways through a step. Sequences that add one token are gathered into padded batches, one
`scaled_dot_product_attention` a layer for each, with the query heads that share a KV head folded
into its query length. A prefill from slot 0 needs no gather. The rest (a prefill after a prefix, a
mask, a softcap, scores) takes one sequence at a time. Does not cover a faster compiled way
(`pie.worker.attention.native`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from pie.worker.attention.protocol import AttentionSpec, Capabilities, Plan, Span

_PADDING = 1.5
"""A padded batch may hold this many times its sequences' slots."""

_PADDING_SLOTS = 128
"""… and this many slots a sequence more: small ones are not worth another call."""

_LOGIT_ELEMENTS = 1 << 22
"""Logits that the explicit way makes at once: 16 MiB."""


class TorchBackend:
    """The fallback of all backends, and the first to be right."""

    name = "torch"
    capabilities = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        mask=True,
        scores=True,
        softcap=True,
        window=True,
        unequal_dims=True,
    )

    def plan(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> Plan:
        """Sort spans by the way they take."""
        return TorchPlan(spans, page_tokens, device)


class TorchPlan:
    """One step: index tensors and masks, made once for each window and shared by its layers."""

    def __init__(self, spans: Sequence[Span], page_tokens: int, device: torch.device) -> None:
        self._page_tokens = page_tokens
        self._device = device
        decode = [s for s in spans if s.tokens == 1 and s.mask is None and s.scores is None]
        self._decode = decode
        self._single = [s for s in spans if s not in decode]
        self._groups: dict[int | None, list[_PaddedGroup]] = {}
        self._views: dict[tuple[int, int | None], _SingleView] = {}

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See `Plan.attend`."""
        if self._decode:
            groups = self._groups.get(spec.window)
            if groups is None:
                groups = self._groups[spec.window] = self._pad(spec.window)
            for group in groups:
                group.attend(spec, query, keys, values, out)
        for span in self._single:
            rows = slice(span.first_row, span.first_row + span.tokens)
            if _is_plain_prefill(span, spec):
                q, k, v = (t[rows].transpose(0, 1).unsqueeze(0) for t in (query, key, value))
                out[rows] = scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=spec.scaling, enable_gqa=spec.group > 1
                )[0].transpose(0, 1)
                continue
            view = self._views.get((span.first_row, spec.window))
            if view is None:
                view = _SingleView(span, spec.window, self._page_tokens, self._device)
                self._views[span.first_row, spec.window] = view
            view.attend(layer, spec, query[rows], keys, values, out[rows])

    def _pad(self, window: int | None) -> list[_PaddedGroup]:
        """Cut decoding sequences into batches of like length."""
        ordered = sorted(
            self._decode, key=lambda span: _pages_read(span, window, self._page_tokens)
        )
        groups: list[list[Span]] = []
        slots = 0
        for span in ordered:
            length = _pages_read(span, window, self._page_tokens) * self._page_tokens
            slots += length
            if groups and length * (len(groups[-1]) + 1) <= max(
                _PADDING * slots, slots + _PADDING_SLOTS * (len(groups[-1]) + 1)
            ):
                groups[-1].append(span)
            else:
                groups.append([span])
                slots = length
        return [_PaddedGroup(group, window, self._page_tokens, self._device) for group in groups]


class _PaddedGroup:
    """Sequences that add one token each, as one padded batch."""

    def __init__(
        self, spans: Sequence[Span], window: int | None, page_tokens: int, device: torch.device
    ) -> None:
        firsts = [_first_page(span, window, page_tokens) for span in spans]
        lasts = [(span.end - 1) // page_tokens for span in spans]
        width = max(last - first + 1 for first, last in zip(firsts, lasts, strict=True))
        # A row shorter than the batch repeats its own first page: valid memory, masked away.
        table = [
            [*span.page_ids[first : last + 1], *[span.page_ids[first]] * (width - 1 - last + first)]
            for span, first, last in zip(spans, firsts, lasts, strict=True)
        ]
        self._rows = torch.tensor([span.first_row for span in spans], device=device)
        first_row = spans[0].first_row
        in_order = all(span.first_row == first_row + i for i, span in enumerate(spans))
        self._run = slice(first_row, first_row + len(spans)) if in_order else None
        self._pages = torch.tensor(table, device=device).flatten()
        self._slots = width * page_tokens
        base = torch.tensor([first * page_tokens for first in firsts], device=device)[:, None]
        end = torch.tensor([span.end for span in spans], device=device)[:, None]
        slots = base + torch.arange(self._slots, device=device)
        allowed = slots < end
        if window is not None:
            allowed &= slots >= end - window
        self._mask = None if bool(allowed.all()) else allowed[:, None, None]
        # What nobody wrote may be NaN, of which a weight of 0 is NaN too. A first page that is
        # repeated holds such slots where it is the last one.
        last = torch.tensor(lasts, device=device)[:, None]
        alone = torch.tensor(firsts, device=device)[:, None] == last
        unwritten = (slots >= end) & ((slots < (last + 1) * page_tokens) | alone)
        self._unwritten = unwritten.flatten().nonzero().flatten()

    def attend(
        self,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        count = len(self._rows)
        q = query[self._run] if self._run is not None else query[self._rows]
        q = q.reshape(count, spec.kv_heads, spec.group, spec.key_dim)
        k = keys.index_select(0, self._pages).view(count, self._slots, spec.kv_heads, spec.key_dim)
        v = values.index_select(0, self._pages).view(
            count, self._slots, spec.kv_heads, spec.value_dim
        )
        for gathered in (k, v) if len(self._unwritten) else ():
            gathered.flatten(0, 1).index_fill_(0, self._unwritten, 0.0)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if spec.softcap is None:
            mask = self._mask
            result = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scaling)
        else:
            result = _weights(q, k, spec, self._mask).to(v.dtype) @ v
        result = result.reshape(count, spec.query_heads, spec.value_dim)
        if self._run is not None:
            out[self._run] = result
        else:
            out[self._rows] = result


class _SingleView:
    """One span of any kind: its pages, and what its tokens may attend to."""

    def __init__(
        self, span: Span, window: int | None, page_tokens: int, device: torch.device
    ) -> None:
        first = _first_page(span, window, page_tokens)
        last = (span.end - 1) // page_tokens
        self._span = span
        self._pages = torch.tensor(list(span.page_ids[first : last + 1]), device=device)
        self._base = first * page_tokens
        self._slots = span.end - self._base
        slots = torch.arange(self._base, span.end, device=device)
        own = torch.arange(span.start, span.end, device=device)[:, None]
        allowed = slots <= own
        if window is not None:
            allowed &= slots > own - window
        if span.mask is not None:
            allowed = allowed & span.mask[..., self._base : span.end].to(device)
        self._allowed = (
            allowed.view(-1, *allowed.shape[-3:]) if allowed.ndim > 2 else allowed[None, None]
        )
        self._has_empty = span.mask is not None and not bool(allowed.any(-1).all())
        self._unread: torch.Tensor | None = None
        """Slots that a mask keeps from all tokens: a sealed page leaves some that nobody wrote."""
        if span.mask is not None:
            self._unread = (~self._allowed.flatten(0, 2).any(0)).nonzero().flatten()

    def attend(
        self,
        layer: int,
        spec: AttentionSpec,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        k = keys.index_select(0, self._pages).flatten(0, 1)[: self._slots].transpose(0, 1)
        v = values.index_select(0, self._pages).flatten(0, 1)[: self._slots].transpose(0, 1)
        if self._unread is not None and len(self._unread):
            k.index_fill_(1, self._unread, 0.0)
            v.index_fill_(1, self._unread, 0.0)
        span = self._span
        # `[query_heads or 1, tokens, slots]`
        allowed = self._allowed[layer if len(self._allowed) > 1 else 0]
        if spec.softcap is None and span.scores is None and not self._has_empty:
            q = query.transpose(0, 1).unsqueeze(0)
            out.copy_(
                scaled_dot_product_attention(
                    q,
                    k.unsqueeze(0),
                    v.unsqueeze(0),
                    attn_mask=allowed,
                    scale=spec.scaling,
                    enable_gqa=spec.group > 1,
                )[0].transpose(0, 1)
            )
            return
        step = max(1, _LOGIT_ELEMENTS // (spec.query_heads * self._slots))
        scored = span.tokens - span.scores_queries
        for at in range(0, span.tokens, step):
            rows = slice(at, min(at + step, span.tokens))
            count = rows.stop - rows.start
            q = query[rows].view(count, spec.kv_heads, spec.group, spec.key_dim).permute(1, 2, 0, 3)
            mask = allowed[:, rows]
            if len(mask) > 1:
                mask = mask.view(spec.kv_heads, spec.group, *mask.shape[1:])
            weights = _weights(q, k[:, None], spec, mask)
            if self._has_empty:
                weights = weights.masked_fill(~mask, 0.0)
            if span.scores is not None and rows.stop > scored:
                paid = weights[:, :, max(scored - at, 0) :].sum(2).flatten(0, 1)
                span.scores[layer, : spec.query_heads, self._base : span.end] += paid
            result = weights.to(v.dtype) @ v[:, None]
            out[rows] = result.permute(2, 0, 1, 3).flatten(1, 2)


def _weights(
    query: torch.Tensor, key: torch.Tensor, spec: AttentionSpec, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return attention weights, float32; NaN where a row may attend to nothing."""
    logits = (query.float() @ key.float().transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        logits = torch.tanh(logits / spec.softcap) * spec.softcap
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return torch.softmax(logits, -1)


def _is_plain_prefill(span: Span, spec: AttentionSpec) -> bool:
    """Say whether a span starts its sequence and its own keys are all that it attends to."""
    return (
        span.start == 0
        and span.is_written
        and span.mask is None
        and span.scores is None
        and spec.softcap is None
        and (spec.window is None or spec.window >= span.tokens)
    )


def _first_page(span: Span, window: int | None, page_tokens: int) -> int:
    """Return the first page that any token of a span reads."""
    return 0 if window is None else max(0, span.start - window + 1) // page_tokens


def _pages_read(span: Span, window: int | None, page_tokens: int) -> int:
    return (span.end - 1) // page_tokens - _first_page(span, window, page_tokens) + 1

"""One forward pass.

Covers how a batch becomes the tensors that a model takes, and how the model's attention calls are
answered: keys and values go to the arena, attention to the backends. Does not cover checking
batches or calling the model (`pie.worker.runner`), or how a step is cut into forward passes
(`pie.worker.forwards`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pie.worker.arena import Arena
from pie.worker.attention.native import NativePlan
from pie.worker.attention.protocol import AttentionBackend, AttentionSpec, Plan, Span
from pie.worker.batch import Batch, LogitRows, Pass
from pie.worker.native.layer import LayerWeights


class Step:
    """Answers the attention calls of one forward pass over a batch."""

    def __init__(
        self,
        batch: Batch,
        arena: Arena,
        attention: Mapping[int, AttentionSpec],
        backends: Sequence[AttentionBackend],
        *,
        as_rows: bool = False,
    ) -> None:
        """Lay the batch out.

        Args:
            batch: Checked.
            arena: Where keys and values are.
            attention: The attention of each layer that has any, by the model's number, in order.
            backends: In order of preference; the last takes everything.
            as_rows: Give the model a row for each pass, all of one token, instead of one row.
        """
        self._arena = arena
        self._specs = list(attention.values())
        self._order = {layer: at for at, layer in enumerate(attention)}
        device = arena.device
        page_tokens = arena.layout.page_tokens
        heads = max((spec.query_heads for spec in self._specs), default=0)
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        skipped: list[int] = []
        wanted: list[int] = []
        self.rows: list[range] = []
        self.scores: list[torch.Tensor | None] = []
        spans: list[Span] = []
        for one in batch.passes:
            row, count = len(ids), len(one.token_ids)
            ids.extend(one.token_ids)
            positions.extend(one.positions or range(one.start, one.end))
            if not attention:
                pass
            elif one.write:
                slots.extend(_slots(one, page_tokens))
            else:
                slots.extend([0] * count)
                skipped.extend(range(row, row + count))
            before = len(wanted)
            if one.logits is LogitRows.ALL:
                wanted.extend(range(row, row + count))
            elif one.logits is LogitRows.LAST:
                wanted.append(row + count - 1)
            self.rows.append(range(before, len(wanted)))
            scores = (
                torch.zeros((len(attention), heads, one.end), device=device)
                if one.scores_queries
                else None
            )
            self.scores.append(scores)
            spans.append(
                Span(
                    first_row=row,
                    tokens=count,
                    start=one.start,
                    page_ids=one.page_ids,
                    is_written=one.write,
                    mask=one.mask,
                    scores=scores,
                    scores_queries=min(one.scores_queries, count),
                )
            )
        assert not as_rows or len(ids) == len(batch.passes), "a row has one token"
        shape = (-1, 1) if as_rows else (1, -1)
        self.input_ids = torch.tensor(ids, device=device).view(shape)
        self.position_ids = torch.tensor(positions, device=device).view(shape)
        self.wanted = torch.tensor(wanted, dtype=torch.long, device=device)
        self._written: torch.Tensor | None = None
        if skipped:
            left = sorted(set(range(len(ids))) - set(skipped))
            self._written = torch.tensor(left, dtype=torch.long, device=device)
            slots = [slots[row] for row in left]
        self._slots = torch.tensor(slots, dtype=torch.long, device=device)
        self._plans = _plans(spans, backends, page_tokens, device) if attention else []
        self._whole: NativePlan | None = None
        if len(self._plans) == 1 and not skipped and not as_rows:
            (plan,) = self._plans
            self._whole = plan if isinstance(plan, NativePlan) else None

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write a layer's keys and values `[rows, kv_heads, tokens, dim]` to the arena."""
        layer = self._order[layer]
        keys, values = _flat(key), _flat(value)
        if self._written is not None:
            keys, values = keys[self._written], values[self._written]
        self._arena.keys[layer].flatten(0, 1).index_copy_(0, self._slots, keys)
        self._arena.values[layer].flatten(0, 1).index_copy_(0, self._slots, values)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002
        *,
        scaling: float | None,  # noqa: ARG002
        window: int | None,  # noqa: ARG002
        softcap: float | None,  # noqa: ARG002
    ) -> torch.Tensor:
        """See `Answerer.attend`; what the layer states was recorded when the model was loaded."""
        index = module.layer_idx
        assert isinstance(index, int)
        layer = self._order[index]
        spec = self._specs[layer]
        q, k, v = _flat(query), _flat(key), _flat(value)
        out = query.new_empty((len(q), spec.query_heads, spec.value_dim))
        keys, values = self._arena.keys[layer], self._arena.values[layer]
        for plan in self._plans:
            plan.attend(layer, spec, q, k, v, keys, values, out)
        return out.view(query.shape[0], query.shape[2], spec.query_heads, spec.value_dim)

    def decoder_layer(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor | None:
        """See `Answerer.decoder_layer`: where the native backend computes all spans."""
        if self._whole is None:
            return None
        at = self._order[layer]
        keys, values = self._arena.keys[at], self._arena.values[at]
        return self._whole.decoder_layer(
            self._specs[at], weights, hidden, cos, sin, keys, values, self._slots
        )

    def mask(self, mask_function: object) -> None:  # noqa: ARG002
        """Build no mask: the backends know what each layer attends to."""
        return


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[rows, heads, tokens, dim]` as `[rows × tokens, heads, dim]`."""
    return tensor[0].transpose(0, 1) if len(tensor) == 1 else tensor.transpose(1, 2).flatten(0, 1)


def _slots(one: Pass, page_tokens: int) -> list[int]:
    """Return the arena's slot of each token of a pass."""
    pages = one.page_ids
    return [
        pages[slot // page_tokens] * page_tokens + slot % page_tokens
        for slot in range(one.start, one.end)
    ]


def _plans(
    spans: Sequence[Span],
    backends: Sequence[AttentionBackend],
    page_tokens: int,
    device: torch.device,
) -> list[Plan]:
    """Give each span to the first backend that takes it."""
    plans: list[Plan] = []
    left = list(spans)
    for backend in backends:
        taken = [span for span in left if backend.capabilities.takes(span)]
        left = [span for span in left if not backend.capabilities.takes(span)]
        if taken:
            plans.append(backend.plan(taken, page_tokens, device))
    assert not left, "the last backend takes everything"
    return plans

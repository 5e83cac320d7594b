"""The recurrent states of one forward pass: taken from their slots, and put back.

Covers which states a model has, and how they get into transformers' cache and out of it. Does not
cover where they lie (`pie.worker.arena`) or whose they are (`pie.worker.state_table`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pie.page.layout import StateSpec
from pie.worker.batch import StateSlot
from pie.worker.hf_cache import PageCache, StateLayer


@dataclass(frozen=True, slots=True)
class StateRef:
    """One state of one layer."""

    layer: int
    pair: int
    """Which of the layer's pairs of states."""
    is_conv: bool
    """Of a pair the convolution's last inputs; else what the recurrence carries."""
    spec: StateSpec


def state_pairs(states: Sequence[StateRef]) -> Mapping[int, int]:
    """Return how many pairs of states each layer has that has any."""
    pairs: dict[int, int] = {}
    for ref in states:
        pairs[ref.layer] = max(pairs.get(ref.layer, 0), ref.pair + 1)
    return pairs


class States:
    """The states of the rows of one forward pass.

    Args:
        refs: What the model has.
        memory: For each of `refs`, `[slots, *shape]`.
        sources: The slot that each row goes on from; None where all rows begin.
        cache: The pass's own.
    """

    def __init__(
        self,
        refs: Sequence[StateRef],
        memory: Sequence[torch.Tensor],
        sources: Sequence[StateSlot] | None,
        cache: PageCache,
    ) -> None:
        self._refs = refs
        self._memory = memory
        self._layers = cache.state_layers
        where = None if sources is None else torch.tensor(sources, device=memory[0].device)
        for ref, tensor in zip(refs, memory, strict=True):
            if where is None:
                state = tensor.new_zeros((1, *tensor.shape[1:]))
            else:
                state = tensor.index_select(0, where)
            _put(self._layers[ref.layer], ref, state, is_previous=where is not None)

    def keep(self, targets: Sequence[StateSlot]) -> list[bool]:
        """Write each row's states to its slot; say of each row whether they are numbers."""
        finite: torch.Tensor | None = None
        where = torch.tensor(targets, device=self._memory[0].device)
        for ref, tensor in zip(self._refs, self._memory, strict=True):
            state = _get(self._layers[ref.layer], ref)
            good = torch.isfinite(state).flatten(1).all(1)
            finite = good if finite is None else finite & good
            tensor.index_copy_(0, where, state)
        assert finite is not None
        return [bool(one) for one in finite.tolist()]


def seen_states(cache: PageCache) -> tuple[StateRef, ...]:
    """Return the states that a forward pass has made."""
    refs: list[StateRef] = []
    for index, layer in cache.state_layers.items():
        for pair in range(layer.number_of_states):
            for is_conv, states in ((True, layer.conv_states), (False, layer.recurrent_states)):
                state = states[pair]
                if state is not None:
                    dtype = str(state.dtype).removeprefix("torch.")
                    refs.append(
                        StateRef(index, pair, is_conv, StateSpec(tuple(state.shape[1:]), dtype))
                    )
    return tuple(refs)


def _put(layer: StateLayer, ref: StateRef, state: torch.Tensor, *, is_previous: bool) -> None:
    if ref.is_conv:
        layer.conv_states[ref.pair] = state
        layer.conv_kernel_size[ref.pair] = state.shape[-1]
        layer.is_conv_states_initialized[ref.pair] = True
    else:
        layer.recurrent_states[ref.pair] = state
        layer.is_recurrent_states_initialized[ref.pair] = True
    layer.has_previous_state[ref.pair] = is_previous


def _get(layer: StateLayer, ref: StateRef) -> torch.Tensor:
    state = (layer.conv_states if ref.is_conv else layer.recurrent_states)[ref.pair]
    assert state is not None
    return state

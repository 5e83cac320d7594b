"""The cache that transformers' models write to.

Covers the `Cache` whose layers hand keys and values on, to the arena in a step and to the record in
a probe, and that hold the recurrent states of the sequences in one forward pass. Does not cover
attention, which reads the arena itself (`pie.worker.step`), or where states come from and go to
(`pie.worker.recurrent`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from pie.worker.errors import UnsupportedModel

Store = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Takes a layer's index, its keys `[rows, kv_heads, tokens, key_dim]` and its values."""


class PageCache(Cache):
    """Looks empty to attention: positions are always given, and attention knows the past.

    Args:
        layers: Layers of the model.
        store: Takes what attention layers store.
        windows: Of each layer, whether its attention has a window; missing ones have none.
        states: Of each layer that has recurrent states, how many pairs of them.
    """

    def __init__(
        self,
        layers: int,
        store: Store,
        *,
        windows: Sequence[bool] = (),
        states: Mapping[int, int] | None = None,
    ) -> None:
        sliding = [*windows, *[False] * (layers - len(windows))]
        self.state_layers: dict[int, StateLayer] = {
            i: StateLayer(i, store, sliding[i], pairs) for i, pairs in (states or {}).items()
        }
        super().__init__(
            layers=[
                self.state_layers.get(i) or PageLayer(i, store, sliding[i]) for i in range(layers)
            ]
        )

    def update_indexer(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        """Refuse."""
        raise UnsupportedModel("the model has an attention index, which Pie does not serve yet")


class PageLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PageCache`."""

    def __init__(self, index: int, store: Store, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding
        self.is_initialized = True
        self._index = index
        self._store = store

    def lazy_initialization(self, *_args: object, **_kwargs: object) -> None:
        """Do nothing: the arena is there already."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_args: object,
        **_kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store the step's keys and values, and return them as they came."""
        self._store(self._index, key_states, value_states)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of the keys that the model sees."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return 0."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: no maximum of its own."""
        return -1


class StateLayer(LinearAttentionLayer, PageLayer):  # type: ignore[misc, no-untyped-call, override]
    """One layer that has recurrent states, and attention or not.

    What a model does to its states is transformers' own code.
    """

    def __init__(self, index: int, store: Store, is_sliding: bool, pairs: int) -> None:
        PageLayer.__init__(self, index, store, is_sliding)
        LinearAttentionLayer.__init__(self, number_of_states=pairs)

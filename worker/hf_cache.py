"""The cache that transformers' models write to.

Covers the `Cache` whose layers hand keys and values on: to the arena in a step, to the record in a
probe. Does not cover attention, which reads the arena itself (`pie.worker.step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from pie.worker.errors import UnsupportedModel

Store = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Takes a layer's index, its keys `[1, kv_heads, tokens, key_dim]` and its values."""


class PageCache(Cache):
    """Looks empty to the model: positions are always given, and attention knows the past."""

    def __init__(self, layers: int, store: Store, *, windows: Sequence[bool] = ()) -> None:
        sliding = [*windows, *[False] * (layers - len(windows))]
        super().__init__(layers=[PageLayer(i, store, sliding[i]) for i in range(layers)])

    def update_conv_state(self, *_args: object, **_kwargs: object) -> torch.Tensor:
        """Refuse."""
        raise UnsupportedModel("the model has recurrent layers, which Pie does not serve yet")

    update_recurrent_state = update_conv_state
    update_indexer = update_conv_state


class PageLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of a `PageCache`."""

    def __init__(self, index: int, store: Store, is_sliding: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_sliding = is_sliding
        self.is_initialized = True
        self._index = index
        self._store = store

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
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

"""How transformers' models reach Pie's attention.

Covers the attention function and the mask function that Pie registers as `pie`, and who answers
them: the forward pass that is under way in this thread. Does not cover what an answerer does
(`pie.worker.step`, `pie.worker.probe`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from pie.worker.errors import UnsupportedModel
from pie.worker.native.layer import LayerWeights

NAME = "pie"
"""What a model's `attn_implementation` is set to."""

HARMLESS = frozenset(
    {
        "cache",
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "kwargs",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments that models hand through to attention and that say nothing about its result."""


class Answerer(Protocol):
    """Computes, or looks at, the attention of one forward pass."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Return `[1, tokens, query_heads, value_dim]`.

        Args:
            module: The layer's attention module.
            query: `[1, query_heads, tokens, key_dim]`
            key: `[1, kv_heads, tokens, key_dim]`, the step's own.
            value: `[1, kv_heads, tokens, value_dim]`, likewise.
            attention_mask: What `mask` returned.
            scaling: Factor of the logits; None is `key_dim ** -0.5`.
            window: As the layer states it.
            softcap: As the layer states it.
        """

    def decoder_layer(
        self,
        layer: int,
        weights: LayerWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> torch.Tensor | None:
        """Return the hidden states after a whole layer, or None to have its modules called.

        Args:
            layer: The layer's number in the model.
            weights: Its own.
            hidden: `[1, tokens, hidden]`, float32 where it comes from a layer computed so.
            cos: `[1, tokens, head_dim]`, of the tokens' positions.
            sin: Likewise.
        """

    def mask(self, mask_function: object) -> torch.Tensor | None:
        """Return what `attend` is to get as `attention_mask` where this mask is meant."""


class _Current(threading.local):
    answerer: Answerer | None = None


_current = _Current()


@contextmanager
def answering(answerer: Answerer) -> Iterator[None]:
    """Let `answerer` compute the attention of forward passes in this thread."""
    before = _current.answerer
    _current.answerer = answerer
    try:
        yield
    finally:
        _current.answerer = before


def current() -> Answerer | None:
    """Return who answers in this thread now."""
    return _current.answerer


def register() -> None:
    """Make `attn_implementation="pie"` known to transformers; twice does no harm."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)


def _answerer() -> Answerer:
    answerer = _current.answerer
    if answerer is None:
        raise UnsupportedModel("the model's attention was called outside of a step")
    return answerer


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    unknown = [k for k, v in others.items() if k not in HARMLESS and v is not None]
    if unknown or dropout or is_causal is False:
        what = ", ".join(unknown) or ("dropout" if dropout else "attention that is not causal")
        raise UnsupportedModel(f"{type(module).__name__} asks for {what}, which Pie does not know")
    out = _answerer().attend(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
    )
    return out, None


def _mask(*, mask_function: object, **_others: object) -> torch.Tensor | None:
    return _answerer().mask(mask_function)

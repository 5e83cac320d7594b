"""What a model's layers do, seen by running it.

Covers trial forward passes of a few tokens that record, layer by layer, the shapes of keys and
values, the attention's arguments, the mask that the model means and its recurrent states, and
refuses what Pie would compute wrongly. Configurations spell these things in too many ways to be
read reliably. Does not cover what a configuration alone tells (`pie.worker.purity`), or whether
a model carries its states on rightly (`pie.worker.selfcheck`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from transformers import PreTrainedModel

from pie.page.events import Part
from pie.page.layout import LayerSpec, PageLayout
from pie.worker.attention.hook import answering
from pie.worker.attention.protocol import AttentionSpec
from pie.worker.errors import UnsupportedModel
from pie.worker.hf_cache import PageCache
from pie.worker.native.layer import LayerWeights
from pie.worker.recurrent import StateRef, seen_states

_TOKENS = (3, 7)
"""Two lengths, on either side of the usual convolution: a state has the same shape after both."""

_MOST_PAIRS = 8
"""Pairs of states in one layer that a probe has room for; transformers' models have up to 2."""

MaskFunction = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' own form of a mask: batch, head, query index, key index."""


@dataclass(frozen=True, slots=True)
class Probed:
    """A model's layers as they are."""

    layers: int
    attention: tuple[tuple[int, AttentionSpec], ...]
    """The layers that have attention, in order."""
    states: tuple[StateRef, ...]
    """The recurrent states, layer by layer."""

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each layer that has any, in order."""
        return tuple(spec for _, spec in self.attention)

    def layout(self, page_tokens: int, dtype: str) -> PageLayout:
        """Return what a page of the model holds."""
        attention = dict(self.attention)
        layers: list[LayerSpec] = []
        for index in range(self.layers):
            if index in attention:
                layers.append(_attention_layer(attention[index]))
            states = tuple(ref.spec for ref in self.states if ref.layer == index)
            if states:
                layers.append(LayerSpec(Part.STATE, states=states))
        return PageLayout(layers=tuple(layers), page_tokens=page_tokens, dtype=dtype)


def probe(model: PreTrainedModel, *, layers: int, context_tokens: int) -> Probed:
    """Run a few tokens and return what was seen.

    Args:
        model: In evaluation mode, with `attn_implementation="pie"`.
        layers: Layers that its configuration names.
        context_tokens: The longest sequence that it was made for; masks are looked at up to there.

    Raises:
        UnsupportedModel: Pie would compute it wrongly.
    """
    first, second = (_trial(model, layers, context_tokens, tokens) for tokens in _TOKENS)
    if first != second:
        raise UnsupportedModel(
            f"the layers of {type(model).__name__} change with the number of tokens"
        )
    return first


def _trial(model: PreTrainedModel, layers: int, context_tokens: int, tokens: int) -> Probed:
    seen = _Probe(context_tokens)
    given: dict[str, object] = {
        "input_ids": torch.zeros((1, tokens), dtype=torch.long, device=model.device)
    }
    if takes_positions(model):
        given["position_ids"] = torch.arange(tokens, device=model.device)[None]
    cache = PageCache(layers, seen.store, states=dict.fromkeys(range(layers), _MOST_PAIRS))
    with torch.inference_mode(), answering(seen):
        try:
            model(**given, cache=cache, use_cache=True)
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            raise UnsupportedModel(
                f"{type(model).__name__} does not run on Pie's cache: {error}"
            ) from error
    return seen.result(layers, seen_states(cache))


def takes_positions(model: PreTrainedModel) -> bool:
    """Say whether a model is told positions; one whose layers are all recurrent has no use for them."""
    return "position_ids" in inspect.signature(model.forward).parameters


def _attention_layer(spec: AttentionSpec) -> LayerSpec:
    return LayerSpec(
        part=Part.FULL if spec.window is None else Part.WINDOW,
        kv_heads=spec.kv_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        window=spec.window,
    )


class _Probe:
    """Answers a trial pass with zeros and records it."""

    def __init__(self, context_tokens: int) -> None:
        self._context_tokens = context_tokens
        self._windows: list[int | None] = []
        self._stored: dict[int, tuple[torch.Size, torch.Size]] = {}
        self._specs: dict[int, AttentionSpec] = {}

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Record what a layer stores."""
        if layer in self._stored:
            raise UnsupportedModel(f"layer {layer} stores keys and values twice in one pass")
        self._stored[layer] = (key.shape, value.shape)

    def mask(self, mask_function: object) -> torch.Tensor:
        """Return a marker that says which of the masks seen this is."""
        self._windows.append(_window_of(cast(MaskFunction, mask_function), self._context_tokens))
        return torch.full((1, 1, 1, 1), len(self._windows) - 1)

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
        """Record a layer's attention."""
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self._specs:
            raise UnsupportedModel(f"{type(module).__name__} does not say which layer it is")
        if self._stored.get(layer) != (key.shape, value.shape):
            raise UnsupportedModel(
                f"layer {layer} attends to other keys and values than it stores, as models do that "
                "compress their cache or share it between layers"
            )
        if attention_mask is None or attention_mask.numel() != 1:
            raise UnsupportedModel(f"layer {layer} makes its attention mask in a way of its own")
        masked = self._windows[int(attention_mask)]
        if window is not None and window < self._context_tokens and window != masked:
            raise UnsupportedModel(
                f"layer {layer} states a window of {window} tokens, its mask one of {masked}"
            )
        heads, dim = query.shape[1], query.shape[-1]
        kv_heads = key.shape[1]
        if heads % kv_heads or key.shape[-1] != dim or query.shape[0] != 1:
            raise UnsupportedModel(
                f"layer {layer} has {heads} query heads of {dim} for {kv_heads} KV heads of "
                f"{key.shape[-1]}"
            )
        self._specs[layer] = AttentionSpec(
            query_heads=heads,
            kv_heads=kv_heads,
            key_dim=dim,
            value_dim=value.shape[-1],
            scaling=dim**-0.5 if scaling is None else float(scaling),
            window=masked,
            softcap=softcap,
        )
        return query.new_zeros((1, query.shape[2], heads, value.shape[-1]))

    def decoder_layer(
        self,
        layer: int,  # noqa: ARG002
        weights: LayerWeights,  # noqa: ARG002
        hidden: torch.Tensor,  # noqa: ARG002
        cos: torch.Tensor,  # noqa: ARG002
        sin: torch.Tensor,  # noqa: ARG002
    ) -> None:
        """Have the layer's modules called: they are what is looked at."""
        return

    def result(self, layers: int, states: tuple[StateRef, ...]) -> Probed:
        """Return the record, in which every layer must have something to carry on."""
        unanswered = sorted(self._stored.keys() - self._specs.keys())
        if unanswered:
            raise UnsupportedModel(
                f"layers {unanswered} compute their attention past transformers' attention "
                "interface"
            )
        recurrent = {ref.layer for ref in states}
        missing = [i for i in range(layers) if i not in self._specs and i not in recurrent]
        if missing or not layers:
            raise UnsupportedModel(
                f"layers {missing} keep neither attention's keys and values nor recurrent states "
                "in transformers' cache, so Pie cannot carry on what they know"
            )
        attention = tuple((i, self._specs[i]) for i in range(layers) if i in self._specs)
        return Probed(layers, attention, states)


def _window_of(mask_function: MaskFunction, context_tokens: int) -> int | None:
    """Return the window that a mask means; None where it is all that came before.

    Raises:
        UnsupportedModel: It means something else.
    """
    keys = torch.arange(context_tokens)

    def allowed(query: int) -> torch.Tensor:
        result = mask_function(0, 0, torch.tensor(query), keys)
        return result.expand(context_tokens).to(torch.bool)

    try:
        width = int(allowed(context_tokens - 1).sum())
        for query in {0, 1, width - 1, width, width + 1, 2 * width + 1, context_tokens - 1}:
            if not 0 <= query < context_tokens:
                continue
            expected = (keys <= query) & (keys > query - width)
            if not torch.equal(allowed(query), expected):
                raise UnsupportedModel(
                    "the model's attention is neither causal nor a sliding window"
                )
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise UnsupportedModel(f"the model's attention mask cannot be read: {error}") from error
    return None if width == context_tokens else width

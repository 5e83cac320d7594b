"""Decoder layers that run as one operation.

Covers which of a model's layers are such as the operation computes (RMS norms, rotary positions by
halves, a gated MLP with SiLU, both added to the residual), packing their weights, and choosing at
each step. Does not cover the operation (`worker/native/layer.h`) or the check that a model with such
layers computes what it did (`pie.worker.selfcheck`).

Layers are known by their class: others have parts of the same names and compute otherwise, some of
them only past a certain position, where no check at a start would see it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from pie.worker.attention import hook
from pie.worker.cpu import multiplies_bfloat16
from pie.worker.huge_pages import HugePages
from pie.worker.memory import free_bytes
from pie.worker.native.layer import LayerWeights
from pie.worker.native.panels import pack, width_of

log = logging.getLogger("pie.worker.fusing")

_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Of transformers' models, those whose layers were read and found to be such."""
_KNOWN_ARGUMENTS = hook.HARMLESS | {"attention_mask"}
_LAYER_PARTS = frozenset({"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
_ATTENTION_PARTS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
_HEAD_NORMS = frozenset({"q_norm", "k_norm"})
_MLP_PARTS = frozenset({"gate_proj", "up_proj", "down_proj"})
_LARGEST_HEAD = 512


class FusedLayer(nn.Module):
    """A decoder layer that is one operation where the step under way allows it, else what it was."""

    def __init__(self, plain: nn.Module, layer: int, weights: LayerWeights) -> None:
        """Wrap.

        Args:
            plain: The layer.
            layer: Its number in the model.
            weights: Its own.
        """
        super().__init__()
        self.plain = plain
        self.layer = layer
        self.weights = weights
        self.is_on = True
        self.is_last = False
        """Whether what comes next takes the model's dtype, not float32."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: object,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return the hidden states after this layer, `[1, tokens, hidden]`.

        Between such layers they are float32, whatever the model's dtype: rounding them at each
        layer is most of what bfloat16 loses.
        """
        answerer = hook.current()
        is_plain = not args and kwargs.keys() <= _KNOWN_ARGUMENTS
        if self.is_on and answerer is not None and position_embeddings is not None and is_plain:
            cos, sin = position_embeddings
            fused = answerer.decoder_layer(self.layer, self.weights, hidden_states, cos, sin)
            if fused is not None:
                return fused.to(self.weights.qkv.dtype) if self.is_last else fused
        out: torch.Tensor = self.plain(
            hidden_states.to(self.weights.qkv.dtype),
            *args,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        return out


def fuse_layers(
    module: nn.Module, *, dtype: torch.dtype, device: torch.device, kv_bytes: int
) -> int:
    """Wrap the layers of a model that allow it and for which memory is left; return how many.

    The kernels must have been built (`pie.worker.attention.native`). The weights are there twice
    afterwards: steps with masks take them as they were.

    Args:
        module: With its weights.
        dtype: Of its weights.
        device: Where they are.
        kv_bytes: Memory that pages are going to take.
    """
    layers = _layers(module)
    if device.type != "cpu" or layers is None:
        return 0
    if dtype is torch.bfloat16:
        if not multiplies_bfloat16():
            return 0
    elif dtype is not torch.float32:
        return 0
    size = sum(one.nbytes for one in layers.parameters())
    if free_bytes(device) - kv_bytes < 2 * size:
        log.warning("layers run operation by operation: there is no memory for packed weights")
        return 0
    fused = 0
    memory = HugePages()
    with torch.inference_mode():
        for number, layer in enumerate(layers):
            if weights := _weights(layer, dtype, memory):
                layers[number] = FusedLayer(layer, number, weights)
                fused += 1
    for one, after in itertools.zip_longest(layers, layers[1:]):
        if isinstance(one, FusedLayer):
            one.is_last = not isinstance(after, FusedLayer)
    return fused


def fused_layers(module: nn.Module) -> list[FusedLayer]:
    """Return the wrapped layers of a model."""
    return [one for one in module.modules() if isinstance(one, FusedLayer)]


@contextlib.contextmanager
def unfused(module: nn.Module) -> Iterator[None]:
    """Run all layers as they were for a while."""
    layers = [one for one in fused_layers(module) if one.is_on]
    for one in layers:
        one.is_on = False
    try:
        yield
    finally:
        for one in layers:
            one.is_on = True


def unfuse(module: nn.Module) -> None:
    """Unwrap all layers for good."""
    layers = _layers(module)
    assert layers is not None
    for number, layer in enumerate(layers):
        if isinstance(layer, FusedLayer):
            layers[number] = layer.plain


def _layers(module: nn.Module) -> nn.ModuleList | None:
    layers = getattr(getattr(module, "base_model", None), "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else None


def _weights(layer: nn.Module, dtype: torch.dtype, memory: HugePages) -> LayerWeights | None:
    """Return a layer's weights, packed; None where it is of another shape."""
    parts = _Parts.of(layer) if _is_known(layer) else None
    if parts is None or any(one.dtype is not dtype for one in layer.parameters()):
        return None
    q, k, v, o = parts.attention
    gate, up, down = parts.mlp
    dim = getattr(layer.self_attn, "head_dim", 0)
    hidden, inner = q.in_features, gate.out_features
    heads, kv_heads = (q.out_features // dim, k.out_features // dim) if dim else (0, 0)
    widths = [
        width_of(hidden, o.in_features, dtype),
        width_of(2 * inner, hidden, dtype),
        width_of(hidden, inner, dtype),
    ]
    shapes = (
        (q, hidden, heads * dim),
        (k, hidden, kv_heads * dim),
        (v, hidden, kv_heads * dim),
        (o, heads * dim, hidden),
        (gate, hidden, inner),
        (up, hidden, inner),
        (down, inner, hidden),
    )
    biased = [one.bias is not None for one in (q, k, v)]
    if (
        not 0 < dim <= _LARGEST_HEAD
        or dim % 2
        or not kv_heads
        or heads % kv_heads
        or any((one.in_features, one.out_features) != (m, n) for one, m, n in shapes)
        or any(biased) != all(biased)
        or any(one.bias is not None for one in parts.mlp)
        or any(norm.numel() != dim for norm in parts.head_norms)
    ):
        return None
    output_width, gate_width, down_width = widths
    if output_width is None or gate_width is None or down_width is None:
        return None
    half = gate_width // 2
    both = torch.stack([gate.weight.view(-1, half, hidden), up.weight.view(-1, half, hidden)], 1)
    query_norm, key_norm = parts.head_norms or (None, None)
    return LayerWeights(
        input_norm=parts.input_norm,
        qkv=memory.copy(pack(torch.cat([q.weight, k.weight, v.weight]), dim)),
        qkv_bias=torch.cat([q.bias, k.bias, v.bias]) if all(biased) else None,
        query_norm=query_norm,
        key_norm=key_norm,
        output=memory.copy(pack(o.weight, output_width)),
        output_bias=o.bias,
        post_norm=parts.post_norm,
        gate_up=memory.copy(pack(both.view(2 * inner, hidden), gate_width)),
        down=memory.copy(pack(down.weight, down_width)),
        epsilon=parts.epsilon,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """A layer's parts, where it has those of the usual shape and no other."""

    attention: list[nn.Linear]
    mlp: list[nn.Linear]
    head_norms: list[torch.Tensor]
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    epsilon: float

    @classmethod
    def of(cls, layer: nn.Module) -> _Parts | None:
        parts = dict(layer.named_children())
        if parts.keys() != _LAYER_PARTS or list(layer.parameters(recurse=False)):
            return None
        attention = dict(parts["self_attn"].named_children())
        mlp = dict(parts["mlp"].named_children())
        has_norms = attention.keys() >= _HEAD_NORMS
        wanted = _ATTENTION_PARTS | (_HEAD_NORMS if has_norms else frozenset())
        own = [
            *parts["self_attn"].parameters(recurse=False),
            *parts["mlp"].parameters(recurse=False),
        ]
        linears = [attention.get(name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        products = [mlp.get(name) for name in ("gate_proj", "up_proj", "down_proj")]
        norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
        norms += [attention[name] for name in ("q_norm", "k_norm")] if has_norms else []
        epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
        epsilon = epsilons.pop() if len(epsilons) == 1 else None
        if (
            attention.keys() != wanted
            or not _MLP_PARTS <= mlp.keys() <= _MLP_PARTS | {"act_fn"}
            or own
            or not all(type(one) is nn.Linear for one in (*linears, *products))
            or not isinstance(epsilon, float)
            or any([name for name, _ in norm.named_parameters()] != ["weight"] for norm in norms)
            or not _is_silu(getattr(parts["mlp"], "act_fn", None))
        ):
            return None
        input_norm, post_norm, *head_norms = [
            norm.get_parameter("weight").detach() for norm in norms
        ]
        return cls(
            [one for one in linears if isinstance(one, nn.Linear)],
            [one for one in products if isinstance(one, nn.Linear)],
            head_norms,
            input_norm,
            post_norm,
            epsilon,
        )


def _is_known(layer: nn.Module) -> bool:
    """Say whether a layer, its attention and its MLP are one family's own."""
    for family, name in _FAMILIES.items():
        home = f"transformers.models.{family}.modeling_{family}"
        found = [(type(one).__module__, type(one).__name__) for one in (layer, *layer.children())]
        wanted = {
            (home, f"{name}{part}") for part in ("DecoderLayer", "Attention", "MLP", "RMSNorm")
        }
        if set(found) == wanted:
            return True
    return False


def _is_silu(function: object) -> bool:
    """Say whether a function is SiLU, by what it does."""
    if not callable(function):
        return False
    numbers = torch.linspace(-8, 8, 65)
    result = function(numbers)
    return isinstance(result, torch.Tensor) and torch.allclose(
        result, nn.functional.silu(numbers), atol=1e-6
    )

"""What a configuration must not say.

Covers the reasons, readable from the configuration, for which a page would not be a pure function
of its tokens (DESIGN §3), and how long a context keeps it one. Does not cover what only running the
model shows (`pie.worker.probe`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from pie.worker.errors import UnsupportedModel

_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
    }
)
"""Kinds of layers, in transformers' words, of which a probe and a self-check show what they do."""

UNNAMED_CONTEXT_TOKENS = 32_768
"""Context of a model that names no limit, as pure recurrent ones do: their state does not grow, so
it is a bound for requests, not for memory."""


def check_config(config: PretrainedConfig) -> None:
    """Refuse a model that Pie cannot serve.

    Raises:
        UnsupportedModel: With the reason.
    """
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{config.model_type} is an encoder-decoder, Pie serves decoders")
    text = config.get_text_config()
    others = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if others:
        raise UnsupportedModel(
            f"{config.model_type} has layers of kind {', '.join(sorted(others))}, "
            "which Pie does not serve yet"
        )
    model: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model is None:
        raise UnsupportedModel(f"{config.model_type} is not a causal language model")
    if getattr(text, "is_causal", True) is False:
        raise UnsupportedModel(f"{config.model_type} attends to tokens that come later")
    if getattr(text, "add_cross_attention", False):
        raise UnsupportedModel(f"{config.model_type} has cross-attention")


def context_limit(config: PretrainedConfig, wanted: int | None = None) -> int:
    """Return the longest sequence whose pages are a pure function of its tokens.

    Dynamic NTK and longrope change every position's encoding once a sequence is longer than what
    the model was first trained on, so such a model is served up to there. A model that names no
    limit is served up to `wanted`, by default `UNNAMED_CONTEXT_TOKENS`.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return wanted or UNNAMED_CONTEXT_TOKENS
    for rope in _ropes(getattr(text, "rope_parameters", None)):
        kind = str(rope.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            original = rope.get("original_max_position_embeddings", limit)
            limit = min(limit, original if isinstance(original, int) else limit)
    return limit


def _ropes(parameters: object) -> Iterator[Mapping[str, object]]:
    """Yield rope parameters, which are one mapping or one for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield parameters
    for value in parameters.values():
        yield from _ropes(value)

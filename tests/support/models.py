"""Models for tests: tiny random ones of several architectures, and SmolLM2.

Random weights have `initializer_range=0.2`: at transformers' default the output hardly depends on
the prompt, and a wrong page would go unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM as Auto,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from pie.worker.model import Model, describe, load_model
from pie.worker.settings import ModelSettings
from pie.worker.sources import ModelFolder

VOCAB_SIZE = 211
CONTEXT_TOKENS = 512
WINDOW = 24


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        num_hidden_layers=3, num_key_value_heads=2, intermediate_size=96, **_common()
    )


def _qwen3() -> PreTrainedConfig:
    return Qwen3Config(
        num_hidden_layers=3, num_key_value_heads=2, head_dim=16, intermediate_size=96, **_common()
    )


def _gemma3() -> PreTrainedConfig:
    """Sliding window in two of three layers, small enough to bite, and its own scaling."""
    return Gemma3TextConfig(
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=16,
        **_common(),
    )


def _gemma2() -> PreTrainedConfig:
    """Caps its logits, in attention and at the end."""
    return Gemma2Config(
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=16,
        **_common(),
    )


def _mistral() -> PreTrainedConfig:
    return MistralConfig(
        num_hidden_layers=2,
        num_key_value_heads=1,
        intermediate_size=96,
        sliding_window=WINDOW,
        **_common(),
    )


def _gpt2() -> PreTrainedConfig:
    """Learned positions."""
    return GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_positions=CONTEXT_TOKENS,
        n_embd=64,
        n_layer=3,
        n_head=4,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "initializer_range": 0.2,
        # Tied, a random model mostly repeats its last token, whatever came before.
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "mistral": _mistral,
}


def tiny_module(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random transformers model with its own attention: the same one for a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = Auto.from_config(  # type: ignore[no-untyped-call]
            CONFIGS[kind](), dtype=dtype, attn_implementation="eager"
        )
    return cast(PreTrainedModel, module.eval())


def tiny_model(
    kind: str,
    *,
    seed: int = 0,
    page_tokens: int = 16,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
) -> Model:
    """Return the same random model as `tiny_module`, with Pie's attention."""
    return describe(
        tiny_module(kind, seed=seed, dtype=dtype),
        found=ModelFolder(Path("/nonexistent"), f"tiny-{kind}", ()),
        fingerprint=f"{kind}-{seed}".encode(),
        page_tokens=page_tokens,
        attention=attention,
    )


def save_tiny(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a tiny model as a Hugging Face folder, without a tokenizer."""
    tiny_module(kind, seed=seed).save_pretrained(folder)
    return folder


def smollm2_settings(**changes: object) -> ModelSettings:
    """Return settings for SmolLM2; its conversion is kept in the user's cache folder."""
    return ModelSettings.model_validate({"source": "smollm2", "dtype": "float32", **changes})


def smollm2(**changes: object) -> Model:
    """Load SmolLM2, converting it if this host has not yet (half a minute)."""
    return load_model(smollm2_settings(**changes))

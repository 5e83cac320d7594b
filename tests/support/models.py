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
    BambaConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    Lfm2Config,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3NextConfig,
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


def _mamba2() -> PreTrainedConfig:
    """Recurrent layers alone."""
    return Mamba2Config(
        num_hidden_layers=3,
        num_heads=8,
        head_dim=16,
        state_size=16,
        n_groups=2,
        chunk_size=16,
        **_recurrent(),
    )


def _falcon_h1() -> PreTrainedConfig:
    """Attention and recurrence in each layer."""
    return FalconH1Config(
        num_hidden_layers=2,
        num_key_value_heads=2,
        intermediate_size=96,
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
        **_common(),
    )


def _qwen3_next() -> PreTrainedConfig:
    """Gated delta rule in three of four layers, and experts."""
    return Qwen3NextConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        **_common(),
    )


def _lfm2() -> PreTrainedConfig:
    """Convolutions, whose states reach three tokens back."""
    return Lfm2Config(
        num_hidden_layers=3,
        num_key_value_heads=2,
        intermediate_size=96,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        **_common(),
    )


def _bamba() -> PreTrainedConfig:
    return BambaConfig(
        num_hidden_layers=3,
        num_key_value_heads=2,
        intermediate_size=96,
        attn_layer_indices=[1],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_chunk_size=16,
        **_common(),
    )


def _mamba() -> PreTrainedConfig:
    """Its code loses the state where several tokens continue a sequence."""
    return MambaConfig(num_hidden_layers=3, state_size=16, **_recurrent())


def _jamba() -> PreTrainedConfig:
    """Likewise, with attention and experts."""
    return JambaConfig(
        num_hidden_layers=4,
        num_key_value_heads=2,
        intermediate_size=96,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_dt_rank=8,
        **_common(),
    )


def _recurrent() -> dict[str, Any]:
    """What models without attention share: no heads of it, and no longest sequence."""
    attention = {"num_attention_heads", "max_position_embeddings"}
    return {name: value for name, value in _common().items() if name not in attention}


RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "mamba2": _mamba2,
    "falcon_h1": _falcon_h1,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
    "bamba": _bamba,
}
STEPPED: dict[str, Callable[[], PreTrainedConfig]] = {"mamba": _mamba, "jamba": _jamba}
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
            (CONFIGS | RECURRENT | STEPPED)[kind](), dtype=dtype, attn_implementation="eager"
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

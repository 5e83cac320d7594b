"""A small model with a tokenizer and a chat template, for programs to run on."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel

from tests.support.chat_folder import write_chat_folder
from tests.support.models import RECURRENT

EOS = 3  # <|im_end|>


def write_program_folder(folder: Path, kind: str = "llama") -> Path:
    """Write a tiny Llama, or recurrent model of a kind, that speaks ChatML; the same one each time."""
    write_chat_folder(folder)
    config = _llama() if kind == "llama" else RECURRENT[kind]()
    config.vocab_size, config.bos_token_id = 416, 0
    config.eos_token_id, config.pad_token_id = EOS, 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    module.save_pretrained(folder)
    return folder


def _llama() -> PreTrainedConfig:
    return LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=96,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def reference_of(folder: Path) -> PreTrainedModel:
    """Return the same model as transformers has it, in float64."""
    module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )
    module.eval()  # type: ignore[no-untyped-call]
    return module

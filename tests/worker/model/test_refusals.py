"""What Pie would compute wrongly is refused with the reason; the rest is served as far as it goes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from pie.worker import memory
from pie.worker.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel
from pie.worker.model import Model, describe, load_model
from pie.worker.purity import UNNAMED_CONTEXT_TOKENS, check_config, context_limit
from pie.worker.selfcheck import verify
from pie.worker.settings import ModelSettings
from pie.worker.sources import ModelFolder
from tests.support.models import CONFIGS, RECURRENT, STEPPED, save_tiny, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def described(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Model:
    module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=dtype, attn_implementation="eager"
    )
    return describe(module, found=ModelFolder(Path("/x"), "m", ()), fingerprint=b"", page_tokens=8)


@pytest.mark.parametrize(
    ("kind", "settings", "said"),
    [
        ("T5Config", {"d_model": 64, "num_layers": 1}, "encoder-decoder"),
        ("ViTConfig", {}, "not a causal language model"),
        ("Llama4TextConfig", {**SMALL, "attention_chunk_size": 16}, "chunked_attention"),
    ],
)
def test_a_configuration_is_refused_with_the_reason(
    kind: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModel, match=said):
        check_config(getattr(transformers, kind)(**settings))


def test_attention_to_later_tokens_is_refused() -> None:
    config = transformers.BertConfig(
        vocab_size=211,
        hidden_size=64,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=64,
    )
    with pytest.raises(UnsupportedModel, match="causal"):
        described(config)


def test_attention_past_transformers_interface_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=211, hidden_size=64, n_head=4, n_layer=2)
    with pytest.raises(UnsupportedModel, match="attention interface"):
        described(config)


def test_a_state_kept_out_of_the_cache_is_refused() -> None:
    config = transformers.RecurrentGemmaConfig(
        **{**SMALL, "num_hidden_layers": 3}, attention_window_size=32
    )
    with pytest.raises(UnsupportedModel, match=r"layers \[0, 1\] keep neither"):
        described(config)


def test_attention_sinks_are_refused() -> None:
    config = transformers.GptOssConfig(
        **SMALL, head_dim=16, num_local_experts=2, sliding_window=16, rope_parameters=None
    )
    with pytest.raises(UnsupportedModel, match="s_aux"):
        described(config)


def test_a_compressed_cache_is_refused() -> None:
    config = transformers.DeepseekV3Config(
        **SMALL,
        n_routed_experts=2,
        n_group=1,
        topk_group=1,
        num_experts_per_tok=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    )
    with pytest.raises(UnsupportedModel, match="compress"):
        described(config)


@pytest.mark.parametrize("kind", [*CONFIGS, *RECURRENT])
def test_what_is_served_passes_its_own_check(kind: str) -> None:
    assert not verify(tiny_model(kind)).stepped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [0.2, 0.02])
@pytest.mark.parametrize("kind", STEPPED)
def test_a_model_whose_code_loses_its_state_is_stepped(
    kind: str, spread: float, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its logits hardly show it, as with a small spread of weights, or are coarse."""
    config = STEPPED[kind]()
    config.initializer_range = spread
    for seed in range(3):
        torch.manual_seed(seed)
        assert verify(described(config, dtype)).stepped
    assert "token by token" in caplog.text


def test_a_model_that_loses_its_state_even_stepped_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("mamba2")
    real = model.module.forward

    def forgetful(*args: Any, cache: Any = None, **kwargs: Any) -> Any:
        for layer in () if cache is None else cache.layers:
            layer.has_previous_state[0] = False
        return real(*args, cache=cache, **kwargs)

    monkeypatch.setattr(model.module, "forward", forgetful)
    with pytest.raises(UnsupportedModel, match="otherwise than transformers"):
        verify(model)


def test_a_model_that_computes_otherwise_over_pages_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stands for an architecture that uses its cache in a way that no probe shows."""
    model = tiny_model("llama")
    real = model.module.forward

    def odd(*args: Any, cache: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        if cache is not None:
            position_ids = position_ids % 8
        return real(*args, cache=cache, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(model.module, "forward", odd)
    with pytest.raises(UnsupportedModel, match="otherwise than transformers"):
        verify(model)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 512),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 128,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            512,
        ),
        (
            {
                "rope_type": "longrope",
                "factor": 8.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
            64,
        ),
    ],
)
def test_positions_that_depend_on_the_length_end_the_context(
    rope: dict[str, Any], limit: int
) -> None:
    assert context_limit(LlamaConfig(**SMALL, rope_parameters=rope)) == limit


def test_a_model_that_names_no_context_has_a_bound_all_the_same() -> None:
    config = RECURRENT["mamba2"]()
    assert context_limit(config) == UNNAMED_CONTEXT_TOKENS
    assert context_limit(config, 100_000) == 100_000


def test_settings_may_shorten_a_context_and_not_lengthen_it(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")

    def load(tokens: int | None) -> Model:
        return load_model(
            ModelSettings(
                source=str(folder),
                context_tokens=tokens,
                dtype="float32",
                cache_folder=tmp_path / "cache",
                attention="torch",
            )
        )

    assert load(100).context_tokens == 100
    assert load(10_000).context_tokens == 512
    assert load(None).context_tokens == 512


def test_a_loaded_folder_is_the_model_that_was_saved(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny", seed=4)
    model = load_model(
        ModelSettings(
            source=str(folder),
            name="mine",
            dtype="float32",
            cache_folder=tmp_path / "cache",
            attention="torch",
        )
    )
    same = tiny_model("llama", seed=4)
    assert model.name == "mine"
    assert model.layout == same.layout
    for mine, theirs in zip(model.module.parameters(), same.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_too_little_memory_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    monkeypatch.setattr(memory, "free_bytes", lambda _device: 300 << 20)
    with pytest.raises(NotEnoughMemory, match="device_kv_budget"):
        load_model(ModelSettings(source=str(folder), cache_folder=tmp_path / "cache"))


def test_broken_weights_are_one_clear_sentence(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    weights = folder / "model.safetensors"
    for content in (weights.read_bytes()[:1000], b"", b"\xff" * 64):
        weights.write_bytes(content)
        with pytest.raises(ModelNotFound, match="weights"):
            load_model(ModelSettings(source=str(folder), cache_folder=tmp_path / "cache"))


def test_an_unknown_architecture_is_one_clear_sentence(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    for text in ('{"model_type": "no-such-thing"}', "{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(UnsupportedModel, match="transformers does not know"):
            load_model(ModelSettings(source=str(folder), cache_folder=tmp_path / "cache"))


def test_an_unknown_backend_names_those_there_are(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "tiny")
    settings = ModelSettings(source=str(folder), cache_folder=tmp_path / "cache")
    settings = settings.model_copy(update={"attention": "fancy"})
    with pytest.raises(UnsupportedModel, match="auto, flash, native, torch"):
        load_model(settings)

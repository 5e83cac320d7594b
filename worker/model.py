"""A model, loaded.

Covers loading weights through transformers' own classes, and all that the rest of a worker and the
index need to know of a model. Does not cover where it comes from (`pie.worker.sources`) or running
it (`pie.worker.runner`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pie.page.key import RootKey, model_root
from pie.page.layout import PageLayout
from pie.worker.arena import TORCH_DTYPES
from pie.worker.attention import hook
from pie.worker.attention.native import native_backend
from pie.worker.attention.protocol import AttentionSpec
from pie.worker.errors import ModelNotFound, NotEnoughMemory, UnsupportedModel
from pie.worker.fingerprint import model_fingerprint
from pie.worker.fusing import fuse_layers
from pie.worker.memory import check_memory
from pie.worker.packing import pack_weights
from pie.worker.probe import probe
from pie.worker.purity import check_config, context_limit
from pie.worker.recurrent import StateRef
from pie.worker.selfcheck import verify
from pie.worker.settings import DEFAULT_CACHE_FOLDER, ModelSettings
from pie.worker.sources import ModelFolder, Progress, quiet, resolve, weight_files

log = logging.getLogger("pie.worker.model")


@dataclass(frozen=True)
class Model:
    """A model that is ready to run, and what it is."""

    name: str
    folder: Path
    """Holds the tokenizer and the chat template too."""
    module: PreTrainedModel
    layout: PageLayout
    specs: Sequence[AttentionSpec]
    """The attention of each layer that has any, in order."""
    attention_layers: Sequence[int]
    """Which of the model's layers those are."""
    states: Sequence[StateRef]
    """The recurrent states that it carries, in the layout's order."""
    layers: int
    """Layers of all kinds."""
    fingerprint: bytes
    context_tokens: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    attention: str
    """Name of the attention backend that was asked for."""
    cache_folder: Path
    """Where compiled backends are kept."""
    stepped: bool = False
    """Whether tokens that continue a recurrent state run one by one, because transformers' code
    loses the state where there are several."""

    @property
    def model_root(self) -> RootKey:
        """What a place that runs this model publishes."""
        return model_root(
            fingerprint=self.fingerprint,
            dtype=self.layout.dtype,
            page_tokens=self.layout.page_tokens,
            layout_id=self.layout.layout_id,
        )


def load_model(settings: ModelSettings, *, progress: Progress = quiet) -> Model:
    """Find, check and load the model that the settings name.

    Raises:
        ModelError: It is not there, does not fit, or Pie cannot serve it.
    """
    cache_folder = settings.cache_folder.expanduser()
    found = resolve(
        settings.source,
        cache_folder=cache_folder,
        revision=settings.revision,
        progress=progress,
    )
    device = _device(settings.device)
    dtype = TORCH_DTYPES[settings.dtype]
    config = _read_config(found.path)
    check_config(config)
    limit = context_limit(config, settings.context_tokens)
    check_memory(
        name=found.name,
        weights=weight_files(found.path),
        dtype=dtype,
        kv_bytes=settings.device_kv_budget,
        device=device,
    )
    progress(f"Loading {found.name}")
    module = _load(found, dtype, device)
    has_kernels = False
    if device.type == "cpu" and settings.attention in {"auto", "native"}:
        has_kernels = native_backend(cache_folder) is not None
    if has_kernels:
        fuse_layers(module, dtype=dtype, device=device, kv_bytes=settings.device_kv_budget)

    def pack() -> None:
        pack_weights(
            module,
            dtype=dtype,
            device=device,
            kv_bytes=settings.device_kv_budget,
            has_kernels=has_kernels,
        )

    pack()
    model = describe(
        module,
        found=found,
        fingerprint=model_fingerprint(found, cache_folder),
        page_tokens=settings.page_tokens,
        context_tokens=min(limit, settings.context_tokens or limit),
        name=settings.name,
        attention=settings.attention,
        cache_folder=cache_folder,
    )
    verified = verify(model)
    # Layers that were found wrong as one operation have been taken apart.
    pack()
    return verified


def describe(
    module: PreTrainedModel,
    *,
    found: ModelFolder,
    fingerprint: bytes,
    page_tokens: int,
    context_tokens: int | None = None,
    name: str | None = None,
    attention: str = "auto",
    cache_folder: Path = DEFAULT_CACHE_FOLDER,
) -> Model:
    """Make a `Model` of a transformers model that is in memory already.

    Sets its attention to Pie's and looks at its layers.

    Raises:
        UnsupportedModel: Pie would compute it wrongly.
    """
    config: PretrainedConfig = module.config
    check_config(config)
    text = config.get_text_config()
    limit = context_limit(config, context_tokens)
    hook.register()
    module.set_attn_implementation(hook.NAME)
    module.eval()  # type: ignore[no-untyped-call]
    dtype = module.dtype
    probed = probe(module, layers=text.num_hidden_layers, context_tokens=limit)
    return Model(
        name=name or found.name,
        folder=found.path,
        module=module,
        layout=probed.layout(page_tokens, str(dtype).removeprefix("torch.")),
        specs=probed.specs,
        attention_layers=tuple(layer for layer, _ in probed.attention),
        states=probed.states,
        layers=probed.layers,
        fingerprint=fingerprint,
        context_tokens=min(context_tokens or limit, limit),
        vocab_size=text.vocab_size,
        dtype=dtype,
        device=module.device,
        attention=attention,
        cache_folder=cache_folder.expanduser(),
    )


def _device(name: str) -> torch.device:
    device = torch.device(name)
    there = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= there:
        raise UnsupportedModel(f"model.device: there is no {name} here, of {there} CUDA devices")
    return device


def _read_config(folder: Path) -> PretrainedConfig:
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True)
    # What a foreign configuration makes transformers raise has no end.
    except Exception as error:
        raise UnsupportedModel(
            f"transformers does not know the model in {folder}: {error}"
        ) from error
    return config


def _load(found: ModelFolder, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    hook.register()
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            found.path, dtype=dtype, attn_implementation=hook.NAME, local_files_only=True
        )
    except MemoryError as error:
        raise NotEnoughMemory(f"{found.name} does not fit into memory") from error
    except (OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelNotFound(f"cannot load the weights in {found.path}: {error}") from error
    except Exception as error:
        raise UnsupportedModel(
            f"transformers cannot run the model in {found.path}: {error}"
        ) from error
    torch.nn.Module.to(module, device)
    return module

"""What an operator may set under `[model]`, each default written once.

Covers the model, its memory, and how a worker's engine schedules. Does not cover where values come
from (`pie.cluster.config`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field

DEFAULT_CACHE_FOLDER = Path("~/.cache/pie")


class ModelSettings(BaseModel):
    """Which model a worker serves, and with what memory."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str = Field(
        default="smollm2",
        min_length=1,
        description="The model: `smollm2` (comes with Pie), a Hugging Face folder, a GGUF file, or "
        "a hub id such as `Qwen/Qwen3-0.6B`.",
    )
    name: str | None = Field(
        default=None,
        min_length=1,
        description="What clients call the model; by default its source's own name.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        description="Branch, tag or commit of a hub id; by default its main branch.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        default="bfloat16", description="What weights, activations and pages are made of."
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$",
        description="Where the model runs: `cpu`, `cuda`, `cuda:1`.",
    )
    context_tokens: int | None = Field(
        default=None,
        ge=2,
        le=1 << 30,
        description="Longest sequence, prompt and output together; by default, and at most, what "
        "the model was made for.",
    )
    page_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens in a page.")
    device_kv_budget: ByteSize = Field(
        default=ByteSize(512 << 20),
        ge=1 << 16,
        le=1 << 50,
        description="Memory for the pages of one worker, such as `4GiB`. Never exceeded.",
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1_024,
        description="CPU threads of one worker; by default the machine's cores over its workers, "
        "at most four for each core.",
    )
    attention: Literal["auto", "flash", "native", "torch"] = Field(
        default="auto",
        description="Attention backend: `flash` (CUDA, with `vllm` or `flash_attn` installed), "
        "`native` (CPU, with a C++ compiler), `torch`; `auto` takes the fastest that is there.",
    )
    cache_folder: Path = Field(
        default=DEFAULT_CACHE_FOLDER,
        description="Where converted models and the hashes of weight files are kept.",
    )
    max_running: int = Field(
        default=64, ge=1, le=4096, description="Sequences that a worker runs at a time."
    )
    max_waiting: int = Field(
        default=256,
        ge=0,
        le=1_000_000,
        description="Requests that wait for their turn at a worker; more are refused for now. With 0 "
        "a request that does not fit at once is refused.",
    )
    step_tokens: int = Field(
        default=1024,
        ge=1,
        le=1_000_000,
        description="Most tokens of one step; at least `max_running` are allowed in any case.",
    )
    step_target_ms: float = Field(
        default=250.0,
        gt=0,
        le=60_000,
        description="How long a step should take while answers are being written: bounds the part "
        "of a long prompt that goes along.",
    )
    store_queue_pages: int = Field(
        default=1024,
        ge=0,
        le=1_000_000,
        description="Pages that wait to be copied to the pool; more are not stored.",
    )
    transfer_timeout_s: float = Field(
        default=5.0, gt=0, le=3_600, description="Longest load from the pool, or store in it."
    )

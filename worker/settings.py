"""What an operator may set under `[model]`, each default written once.

Covers the model, its memory, and how a worker's engine schedules. Does not cover where values come
from (`pie.cluster.config`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator

from pie.policies.order_limits import BYTES_PER_S
from pie.pool.settings import Compression

DEFAULT_CACHE_FOLDER = Path("~/.cache/pie")
_LEAST_TIER_BYTES = 1 << 20


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
        "the model was made for and what `device_kv_budget` holds. A model that names no limit, as pure recurrent ones do, takes any; "
        "its default is 32768.",
    )
    page_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens in a page.")
    device_kv_budget: ByteSize = Field(
        default=ByteSize(512 << 20),
        ge=1 << 16,
        le=1 << 50,
        description="Memory for the pages and recurrent states of one worker, such as `4GiB`. Never "
        "exceeded.",
    )
    state_share: float = Field(
        default=0.5,
        gt=0,
        lt=1,
        description="Most of `device_kv_budget` that recurrent states take in a model that has "
        "attention too; pages get the rest. A model without attention gives them all.",
    )
    program_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Most of the pages that users' programs (inferlets) hold together; what they share with "
        "each other counts once.",
    )
    program_host_budget: ByteSize = Field(
        default=ByteSize(256 << 20),
        ge=0,
        le=1 << 50,
        description="Host memory for the pages of working sets that programs have parked. Never exceeded; "
        "taken only while there are some.",
    )
    state_stride_tokens: int = Field(
        default=512,
        ge=1,
        le=1 << 20,
        description="A recurrent model's state is kept at every so many tokens, in whole pages, and "
        "at the last page's end before a prompt's last token: where later prompts can go on.",
    )
    host_kv_budget: ByteSize = Field(
        default=ByteSize(256 << 20),
        ge=0,
        le=1 << 50,
        description="Host memory for pages that leave a worker's device memory, such as `16GiB`; "
        "0 turns this tier off. Never exceeded.",
    )
    disk_kv_budget: ByteSize = Field(
        default=ByteSize(0),
        ge=0,
        le=1 << 60,
        description="Disk space of one worker for pages that leave its host memory; they survive "
        "a restart. 0 turns this tier off. Never exceeded.",
    )
    disk_kv_path: Path = Field(
        default=Path(".pie/kv"),
        description="Where pages on disk lie; each worker has a folder of its own in it.",
    )
    disk_compression: Compression = Field(
        default=Compression.NONE,
        description="How pages on disk are packed: `none`, `lz4`, `bshuf-lz4` (the bytes of numbers "
        "sorted by place first), or `auto`: what saves most, where samples say that it saves a tenth "
        "or more.",
    )
    keep_bad_pages: bool = Field(
        default=False,
        description="Set damaged page files of a worker aside, the latest 32 in `bad/` of its "
        "folder, instead of removing them.",
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
        description="Pages that wait to be copied to host memory, disk and pool; more are not "
        "copied before they leave device memory.",
    )
    transfer_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=3_600,
        description="Longest load from a lower tier or the pool, or store.",
    )
    order_rate: ByteSize = Field(
        default=ByteSize(BYTES_PER_S),
        ge=1 << 20,
        le=1 << 50,
        description="Payload bytes a second that one worker moves for orders of cluster policies, beside its steps.",
    )

    @field_validator("host_kv_budget", "disk_kv_budget")
    @classmethod
    def _is_off_or_enough(cls, value: ByteSize) -> ByteSize:
        if 0 < value < _LEAST_TIER_BYTES:
            raise ValueError("0 turns the tier off; otherwise it is 1MiB or more")
        return value


Origin = tuple[str, str, int]
"""Scheme, host in lower case, port."""


def default_port(scheme: str) -> int:
    """Return the port of a scheme that names none."""
    return 443 if scheme == "https" else 80


class HttpGrant(BaseModel):
    """A server that programs may ask by HTTP."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: str
    """`https://HOST` or `http://HOST:PORT`, without a path."""
    methods: tuple[str, ...] = ("GET", "HEAD")
    private: bool = False
    """Whether its name may lead to addresses that are not public; one that is an address may."""

    @field_validator("origin")
    @classmethod
    def _is_origin(cls, value: str) -> str:
        wrong = ValueError("an origin is https://HOST or http://HOST:PORT, and nothing more")
        try:
            parts = urlsplit(value)
            named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            raise wrong from None
        more = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
        if not named or more or not value.isascii():
            raise wrong
        return value

    @field_validator("methods")
    @classmethod
    def _are_methods(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(one.isalpha() and one.isupper() for one in value):
            raise ValueError('methods are names in capitals, such as "GET"')
        return value

    def is_for(self, origin: Origin) -> bool:
        """Say whether this is what it grants."""
        parts = urlsplit(self.origin)
        own = (parts.scheme, parts.hostname, parts.port or default_port(parts.scheme))
        return own == origin


class ProgramSettings(BaseModel):
    """What users' programs (inferlets) may take, each of them unless it says otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    allow: bool = Field(
        default=False,
        description="Whether clients of a cluster may install and run programs: their Python, on the "
        "hosts of its workers (docs/security.md). `pie run` on a model of its own needs no permission.",
    )
    most: int = Field(
        default=16, ge=1, le=1024, description="Programs that run at a time, at each worker."
    )
    memory: ByteSize = Field(
        default=ByteSize(1 << 30),
        ge=1 << 28,
        le=1 << 40,
        description="Address space of a program's process; Python and NumPy take about 200 MiB of it.",
    )
    cpu_s: int = Field(
        default=300, ge=1, le=1 << 20, description="CPU time of a program, in seconds."
    )
    wall_s: float = Field(
        default=600, gt=0, le=1 << 20, description="How long a program may run, in seconds."
    )
    open_files: int = Field(
        default=64, ge=16, le=1 << 16, description="Files that a program may have open."
    )
    output: ByteSize = Field(
        default=ByteSize(1 << 20),
        ge=1024,
        le=4 << 20,
        description="What a program may print, what it may say to its client, and how long its result "
        "may be, each.",
    )
    http: tuple[HttpGrant, ...] = Field(
        default=(),
        max_length=1024,
        description="Servers that programs may ask by HTTP; none by default. Each is "
        '`{origin = "https://api.example.com", methods = ["GET"], private = false}`: `methods` are GET and '
        "HEAD where they are not given, and `private` lets the name lead to addresses that are not public "
        "(docs/security.md).",
    )
    http_bytes: ByteSize = Field(
        default=ByteSize(1 << 20),
        ge=1024,
        le=32 << 20,
        description="Largest body of a program's HTTP request, and of what it is answered; and of what it gives "
        "a tool, and the tool returns.",
    )
    http_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="How long a program's HTTP request may take."
    )
    http_at_once: int = Field(
        default=4,
        ge=1,
        le=256,
        description="HTTP requests of a program that are under way at once.",
    )
    tools: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="Python functions that programs may call, as `module:function` or `FILE.py:function`; they "
        "run in the worker's process, with its rights (docs/security.md). None by default.",
    )
    tool_timeout_s: float = Field(
        default=60.0, gt=0, le=86_400, description="How long a call of a tool may take."
    )
    tools_at_once: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Calls of tools by a program that are under way at once.",
    )

"""The router's settings, each default written once.

Covers what an operator may set under `[router]`. Does not cover where values come from
(`pie.cluster.config`).
"""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    field_validator,
    model_validator,
)

from pie.policies.order_limits import BYTES_PER_S


class RouterSettings(BaseModel):
    """How the front door listens, and the limits it keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Beyond loopback `api_token` or `keys_file` must be set.",
    )
    port: int = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one."
    )
    api_token: SecretStr = Field(
        default=SecretStr(""),
        description="Bearer token that every request but `/health`, `/ready` and `/openapi.json` must carry; empty asks for none.",
    )
    keys_file: Path | None = Field(
        default=None,
        description="File of tenants and their API keys, which `pie key` writes. With it a request needs one "
        "of those keys, or `api_token`.",
    )
    tls_cert_file: Path | None = Field(
        default=None,
        description="Certificate chain (PEM) for HTTPS; unset serves plain HTTP.",
    )
    tls_key_file: Path | None = Field(
        default=None, description="Private key (PEM) of `tls_cert_file`, without a password."
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        max_length=256,
        description="Origins whose pages in a browser may ask, such as `https://chat.example.org`; `*` is any. "
        "None but the router's own may by default. Without a token or keys, these hosts also name the router.",
    )
    max_in_flight: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Sequences in flight at this router; one more is answered 429.",
    )
    max_connections: int = Field(
        default=512,
        ge=1,
        le=1_000_000,
        description="Clients' connections at a time. One more takes the place of the one that has been "
        "without a request for longest, and is answered 503 where all have one.",
    )
    max_head_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024),
        gt=0,
        le=16 << 20,
        description="Largest request line and headers together; larger ones are refused with 431.",
    )
    max_body_bytes: ByteSize = Field(
        default=ByteSize(16 * 1024 * 1024),
        gt=0,
        le=4 << 30,
        description="Largest request body; a larger one is refused with 413 while it is read.",
    )
    body_budget_bytes: ByteSize = Field(
        default=ByteSize(256 * 1024 * 1024),
        gt=0,
        le=1 << 40,
        description="Memory for the bodies of all requests that are being read; past it 429.",
    )
    max_choices: int = Field(default=16, ge=1, le=1_024, description="Largest `n` and `best_of`.")
    max_prompts: int = Field(
        default=64, ge=1, le=65_536, description="Most prompts in one completion request."
    )
    max_stop_strings: int = Field(default=16, ge=1, le=256, description="Most strings in `stop`.")
    max_logprobs: int = Field(
        default=20,
        ge=0,
        le=256,
        description="Most likely tokens that a request may ask for a position.",
    )
    default_completion_tokens: int = Field(
        default=16,
        ge=1,
        le=1 << 30,
        description="`max_tokens` of a `/v1/completions` request that names none.",
    )
    head_timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=86_400,
        description="Longest time from a connection, or a request's first byte, to the end of its headers.",
    )
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="Longest wait for the next part of a request's body.",
    )
    body_total_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="Longest time that a request's body may take as a whole.",
    )
    request_timeout_s: float = Field(
        default=900.0, gt=0, le=86_400, description="Longest time from a request to its last token."
    )
    first_token_timeout_s: float = Field(
        default=300.0, gt=0, le=86_400, description="Longest wait for a worker's first token."
    )
    token_gap_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Longest silence of a worker between two tokens; then another one goes on.",
    )
    send_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="Longest wait for a client to take what was sent.",
    )
    attempts: int = Field(
        default=4,
        ge=1,
        le=100,
        description="Workers tried for one sequence until its next token, the first included. Of one that has begun, "
        "a full worker counts for none.",
    )
    worker_wait_s: float = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="Longest wait of a request that lost its worker for one to come back or, once its answer has "
        "begun, for one with room.",
    )
    retry_after_s: float = Field(
        default=2.0,
        gt=0,
        le=86_400,
        description="`Retry-After` of an answer that does not know better.",
    )
    allow_place_header: bool | None = Field(
        default=None,
        description="Whether a request may name its worker (`x-pie-place`), which is for tools and tests. "
        "Unset allows it on loopback alone.",
    )
    max_workers_connected: int = Field(
        default=256, ge=1, le=65_536, description="Workers that this router keeps a connection to."
    )
    thread_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024),
        ge=0,
        le=4 << 30,
        description="A prompt of more bytes is tokenised in a thread, so that it stalls no stream.",
    )
    remembered_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024 * 1024),
        ge=0,
        le=1 << 40,
        description="Memory for the token ids of answers, which make the next turn's prompt hit.",
    )
    tokenised_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024 * 1024),
        ge=0,
        le=1 << 40,
        description="Memory for texts between special tokens and their token ids, so that none is tokenised twice.",
    )
    installed_bytes: ByteSize = Field(
        default=ByteSize(16 * 1024 * 1024),
        ge=1 << 20,
        le=1 << 36,
        description="Memory for the texts of programs (inferlets) that clients installed; beyond it the "
        "tenant whose programs take most loses the one that it used last the longest ago.",
    )
    responses_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024 * 1024),
        ge=0,
        le=1 << 40,
        description="Memory for responses of `/v1/responses` and their conversations, which "
        "`previous_response_id` goes on with: so much in the index's Redis, encrypted, and at each router.",
    )
    kept_s: float = Field(
        default=604_800,
        ge=1,
        le=31_536_000,
        description="Longest time that a response is kept which nobody goes on with, or what `pie explain` can tell of a request.",
    )
    explained_requests: int = Field(
        default=10_000,
        ge=0,
        le=10_000_000,
        description="Requests whose course `pie explain` can tell, the latest ones; 0 keeps none.",
    )
    explained_bytes: ByteSize = Field(
        default=ByteSize(64 * 1024 * 1024),
        ge=0,
        le=1 << 40,
        description="Memory for what is kept of them, at a kilobyte or two each: so much in the index's Redis, "
        "encrypted, and at each router.",
    )
    trace_dir: str = Field(
        default="",
        description="Folder for a trace of all requests in Parquet files: keys of pages, lengths and "
        "times, never text or token ids. Empty records none.",
    )
    trace_budget_bytes: ByteSize = Field(
        default=ByteSize(1024 * 1024 * 1024),
        gt=0,
        le=1 << 50,
        description="Bytes of all traces in that folder; the oldest are removed beyond them.",
    )
    order_rate: ByteSize = Field(
        default=ByteSize(BYTES_PER_S),
        ge=1 << 20,
        le=1 << 50,
        description="Payload bytes a second that orders of cluster policies may move in the whole cluster. The router that leads "
        "keeps to it; a worker's own share is `model.order_rate`.",
    )
    index_ready_timeout_s: float = Field(
        default=30.0,
        gt=0,
        le=86_400,
        description="Longest wait at the start for the index to be read.",
    )

    @property
    def takes_place_header(self) -> bool:
        """Whether a request may name its worker."""
        if self.allow_place_header is None:
            return is_loopback(self.host)
        return self.allow_place_header

    def url(self, host: str, port: int) -> str:
        """Return the base URL of a router that listens there."""
        scheme = "http" if self.tls_cert_file is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def asks_for_a_key(self) -> bool:
        """Whether only those with a token or key may ask."""
        return bool(self.api_token.get_secret_value()) or self.keys_file is not None

    @model_validator(mode="after")
    def _token_beyond_loopback(self) -> RouterSettings:
        """Nothing listens beyond loopback without a token."""
        if not is_loopback(self.host) and not self.asks_for_a_key:
            raise ValueError(
                f"router.host is {self.host!r}, beyond loopback: set router.api_token or "
                "router.keys_file as well"
            )
        return self

    @model_validator(mode="after")
    def _both_files_of_tls(self) -> RouterSettings:
        """A certificate is nothing without its key."""
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("router.tls_cert_file and router.tls_key_file are set together or not")
        return self

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", origin):
                raise ValueError(f"{origin!r} is no origin, such as https://chat.example.org")
        return value


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False

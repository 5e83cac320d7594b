"""The `[cluster]` section: how many of what, and where they run."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class ClusterSettings(BaseModel):
    """How many workers run, and what holds them together."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    workers: int = Field(default=2, ge=1, le=64, description="Workers, one model copy each.")
    routers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Routers, a process each, which share one port; the system deals connections out to them.",
    )
    ray_address: str = Field(
        default="",
        description=(
            "Address of a running Ray cluster, such as `127.0.0.1:6380`; empty starts a private "
            "one. Pie's processes run on the node where `pie serve` runs, unless `spread`."
        ),
    )
    spread: bool = Field(
        default=False,
        description=(
            "Whether workers and pool nodes are placed in turn on all nodes of the Ray that "
            "`ray_address` joins, and talk encrypted; Pie is installed there, and `index.url` and "
            "`log_dir` mean the same on each. Unset keeps all on the node where `pie serve` runs."
        ),
    )
    start_timeout_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Seconds that the model's conversion and the start of all parts may take.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        ge=0,
        le=3_600,
        description="Seconds that running requests get to finish when the cluster stops.",
    )
    encryption_keys: SecretStr = Field(
        default=SecretStr(""),
        description=(
            "Keys that pages on disk are encrypted with, 64 hexadecimal digits each (`openssl rand "
            "-hex 32`), separated by spaces or lines: the first writes, all read. Empty encrypts "
            "nothing. Best set in the environment, or in `encryption_key_file`."
        ),
    )
    encryption_key_file: Path | None = Field(
        default=None,
        description="A file with such keys, one a line; lines that begin with `#` are passed over.",
    )
    secret_file: Path | None = Field(
        default=None,
        description=(
            "File with the 32 bytes that all parts of a cluster share, made by `pie serve` where it is not there: "
            "pages are keyed and connections between hosts encrypted with it, so hosts need copies "
            "of one. Unset keeps it beside the pages on disk, or makes one for each run."
        ),
    )
    log_dir: Path | None = Field(
        default=None,
        description=(
            "Folder for the parts' log files; unset keeps them in a temporary folder that goes "
            "when the cluster stops."
        ),
    )

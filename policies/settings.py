"""What can be set about policies.

Covers the `[policies]` section, which names the policy file. Does not cover what is in that file
(`pie.policies.loader`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class PolicySettings(BaseModel):
    """Where policies come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    file: Path | None = Field(
        default=None,
        description="Policy file (YAML). Unset uses the built-ins `lru` and `cost`.",
    )

"""What can be set about policies.

Covers the `[policies]` section, which names the policy file. Does not cover what is in that file
(`pie.policies.loader`).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PolicySettings(BaseModel):
    """Where policies come from."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    file: Path | None = Field(
        default=None,
        description="Policy file (YAML). Unset uses the built-ins.",
    )
    watch: bool = Field(
        default=False,
        description="Whether `pie serve` watches `file`, such as a mounted ConfigMap, and puts each edit in "
        "force everywhere, as `pie policy apply` does. An edit that is not acceptable changes nothing.",
    )

    @model_validator(mode="after")
    def _watches_a_file(self) -> PolicySettings:
        if self.watch and self.file is None:
            raise ValueError("watch needs file: the policy file to watch")
        return self

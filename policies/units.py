"""Kinds of values that options of policies take.

Covers ranges, as annotations of constructors' arguments. Does not cover checking them
(`pie.policies.options`).
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Positive = Annotated[float, Field(gt=0)]
"""A number above 0."""

Share = Annotated[float, Field(gt=0, lt=1)]
"""A number between 0 and 1."""
